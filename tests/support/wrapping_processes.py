"""Proxy and shim as processes around a driver's socket, for a CO that may be any program."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from tests.support.foreign import cloud, minimal

TIMEOUT_S = 30.0
NAMES = {"cloud": cloud.NAME, "minimal": minimal.NAME}


@contextmanager
def wrapping(base: Path, kind: str, driver_socket: str) -> Iterator[str]:
    """The proxy's CSI socket while the block runs."""
    front, run, shim = base / "csi.sock", base / "run", base / "shim.sock"
    root = base / "kubelet"
    arguments = [
        [
            "shim",
            f"--socket={shim}",
            f"--driver-socket={driver_socket}",
            f"--runtime-socket={run / 'runtime.sock'}",
            f"--kubelet-root={root}",
            "--no-check-propagation",
        ],
        [
            "proxy",
            f"--run-dir={run}",
            f"--volumes-root={run / 'volumes'}",
            f"--driver={NAMES[kind]},{front},{shim}",
            f"--target-root={root}",
            "--no-check-propagation",
        ],
    ]
    with ExitStack() as stack, (base / "crust.log").open("wb") as log:
        for each in arguments:
            command = [sys.executable, "-m", "crust", *each]
            started = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(started.wait)
            stack.callback(started.terminate)
        with grpc.insecure_channel(f"unix:{front}") as channel:
            grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
        yield str(front)
