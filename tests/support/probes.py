"""What is on a device, for a test that runs on an event loop."""

from concurrent.futures import ThreadPoolExecutor

from crust.host.block import signatures


def probed(path: str) -> signatures.Signature:
    """`signatures.probe`, which needs a thread without a loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(signatures.probe, path).result()
