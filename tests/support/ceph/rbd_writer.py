"""A process that has an image of RBD open and writes when it is told to: what a hypervisor is to the cluster."""

import contextlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from examples.cluster import freezing
from examples.cluster.ceph_cluster import POOL, CephCluster


@dataclass(frozen=True, slots=True)
class Writer:
    """The process; it has written once and so has librbd's lock."""

    process: "subprocess.Popen[str]"

    def write(self, data: bytes) -> None:
        """Write at the image's start and flush; raises AssertionError if that fails."""
        self._tell(data)
        self.wait()

    def send(self, data: bytes) -> None:
        """Begin a write and a flush, and wait for neither."""
        self._tell(data, " ")

    def kill(self) -> None:
        """End it as the kernel ends a process of a pod, and wait until it has ended."""
        self.process.kill()
        self.process.wait()

    def _tell(self, data: bytes, mark: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mark}{data.hex()}\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "written\n"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it while the block runs: a virtual machine that is paused, or a node that is cut off."""
        freezing.freeze(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running(ceph: CephCluster, namespace: str, image: str) -> Iterator[Writer]:
    """A writer with a user of its own, while the block runs."""
    user = f"node-{uuid.uuid4().hex[:8]}"
    key = ceph.node(user, namespace)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ceph.rbd_writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    question = [ceph.monitors, user, key, namespace, image]
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    writer = Writer(process)
    try:
        writer.write(b"first")
        yield writer
        if process.returncode is None:  # it was not killed
            process.stdin.close()
            assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not flushed
                    pipe.close()


def main() -> None:
    """Open, then write each line of standard input."""
    import rados
    import rbd

    monitors, user, key, namespace, name = json.loads(sys.stdin.readline())
    options = {"mon_host": monitors, "key": key, "keyring": "", "admin_socket": "", "log_file": ""}
    with rados.Rados(rados_id=user, conf=options) as cluster, cluster.open_ioctx(POOL) as ioctx:
        ioctx.set_namespace(namespace)
        with rbd.Image(ioctx, name) as image:
            for line in sys.stdin:
                if line.startswith(" "):
                    image.aio_write(bytes.fromhex(line), 0, _ignored)
                    image.aio_flush(_ignored)
                    continue
                image.write(bytes.fromhex(line), 0)
                image.flush()
                sys.stdout.write("written\n")
                sys.stdout.flush()


def _ignored(*_: object) -> None:
    """Nobody waits for the outcome."""


if __name__ == "__main__":
    main()
