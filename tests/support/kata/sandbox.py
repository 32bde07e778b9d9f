"""A sandbox of Kata without Kata: a process in the place of the virtual machine, and what its runtime leaves behind.

The files have the keys and the order that the real shims 3.30.0 and 4.1.0 wrote, as far as crust reads them. The
process has the sandbox's id among its arguments, as cloud-hypervisor has it in the path of its API socket, and opens
and closes devices on command, as the real one does when a container is created and ends. With runtime-rs it listens
at that socket, or has the name that runtime-rs gives to QEMU, and the runtime makes an empty directory in the
sandbox's share for each mount. Another process is the shim, by its arguments alone.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_PROGRAM = """
import os, sys
devices = {}
if sys.argv[1] == "--api-socket":
    import socket
    api = socket.socket(socket.AF_UNIX)
    api.bind(sys.argv[2])
    api.listen()
print(os.getpid(), flush=True)
for line in sys.stdin:
    word, path = line.split()
    if word == "attach":
        devices[path] = os.open(path, os.O_RDWR)
    else:
        os.close(devices.pop(path))
    print("done", flush=True)
"""


@dataclass
class StandInSandbox:
    """One sandbox; `root` is the directory of its runtime's state, /run/vc/sbs on a node."""

    root: Path
    id: str
    process: subprocess.Popen[str]
    shim: subprocess.Popen[bytes]
    _mounts: dict[str, dict[str, object]] = field(init=False, default_factory=dict)
    """The mounts of each container, by their destinations."""

    @property
    def pid(self) -> int:
        """The virtual machine's process."""
        return self.process.pid

    def attach(self, device: str) -> None:
        """The virtual machine opens the device."""
        self._tell(f"attach {device}")

    def detach(self, device: str) -> None:
        """It closes it."""
        self._tell(f"detach {device}")

    def create_container(self, container_id: str, device: str, destination: str) -> None:
        """What the shim leaves when it has attached and mounted a device for a container."""
        self.attach(device)
        self.write_container(container_id, device, destination)

    def write_container(
        self, container_id: str, device: str, destination: str, *, id_: str = "e0f5af92"
    ) -> None:
        """The state of a container with one more mount; an empty `id_`: no device was attached for it."""
        own = self._mounts.setdefault(container_id, {"/proc": _mount("proc", "/proc", "")})
        own[destination] = _mount(device, destination, id_)
        mounts = list(own.values())
        (self.root / self.id / container_id).mkdir(exist_ok=True)
        state: dict[str, object] = {"State": "ready", "CgroupPath": "", "Mounts": mounts}
        self._write(f"{container_id}/persist.json", state)

    def write(
        self, pid: int | None = None, *, shares: bool = False, driver: str = "virtio-blk"
    ) -> None:
        """The sandbox's state, with its own process unless another is named."""
        (self.root / self.id).mkdir(parents=True, exist_ok=True)
        hypervisor = {
            "BlockIndexMap": {"0": {}},
            "Type": "clh",
            "UUID": "",
            "Pid": self.pid if pid is None else pid,
        }
        disks = {"DisableBlockDeviceUse": shares, "BlockDeviceDriver": driver}
        config = {"HypervisorType": "clh", "HypervisorConfig": disks}
        state = {"State": "running", "HypervisorState": hypervisor, "Config": config}
        self._write("persist.json", {**state, "PersistVersion": 2})

    def kill(self) -> None:
        """The virtual machine ends at once."""
        self.process.kill()
        self.process.wait()

    def _write(self, path: str, state: dict[str, object]) -> None:
        (self.root / self.id / path).write_text(json.dumps(state, separators=(",", ":")) + "\n")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@dataclass
class StandInRustSandbox(StandInSandbox):
    """One of runtime-rs; `root` is /run/kata on a node, `shares` /run/kata-containers/shared/sandboxes."""

    shares: Path = Path()

    def create_container(self, container_id: str, device: str, destination: str) -> None:
        """What the shim leaves; it does not write down which container it was."""
        self.attach(device)
        self.make_mount(destination)

    def make_mount(self, destination: str) -> str:
        """The directory of a mount, which stays until the sandbox ends; returns its path in the guest."""
        last = destination.rpartition("/")[2]
        name = f"{secrets.token_hex(5)}-{secrets.token_hex(4)}-{last}"
        (self.shares / self.id / "rw" / "passthrough" / name).mkdir(parents=True)
        return f"/run/kata-containers/shared/containers/passthrough/{name}"


def _mount(source: str, destination: str, device_id: str) -> dict[str, object]:
    return {
        "Source": source, "Destination": destination, "Type": "", "HostPath": "",
        "BlockDeviceID": device_id, "Options": [], "ReadOnly": False,
    }  # fmt: skip


@contextmanager
def running(root: Path, id_: str) -> Iterator[StandInSandbox]:
    """A sandbox whose virtual machine runs while the block does."""
    with a_shim(id_) as shim, _machine(f"/run/vc/vm/{id_}/clh-api.sock") as process:
        sandbox = StandInSandbox(root, id_, process, shim)
        sandbox.write()
        try:
            yield sandbox
        finally:
            sandbox.kill()


@contextmanager
def running_rust(
    root: Path, shares: Path, id_: str, hypervisor: str = "clh"
) -> Iterator[StandInRustSandbox]:
    """A sandbox of runtime-rs whose virtual machine, `clh` or `qemu`, runs while the block does."""
    (root / id_).mkdir(parents=True)
    machine = {
        "clh": ("--api-socket", str(root / id_ / "ch-api.sock")),
        "qemu": ("-name", f"sandbox-{id_}"),
    }[hypervisor]
    with a_shim(id_) as shim, _machine(*machine) as process:
        sandbox = StandInRustSandbox(root, id_, process, shim, shares)
        try:
            yield sandbox
        finally:
            sandbox.kill()


@contextmanager
def _machine(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-IS", "-c", _PROGRAM, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        yield process


@contextmanager
def a_shim(
    id_: str, *, program: str = "containerd-shim-kata-v2", user: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the arguments of a sandbox's shim, of this program's name, of this user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = shutil.copy(shutil.which("sh") or "/bin/sh", f"{directory}/{program}")
        argv = [path, "-c", "echo; read line", "-namespace", "k8s.io", "-id", id_]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, user=user) as process:
            assert process.stdout is not None
            process.stdout.readline()  # execve(2) ends the wait of Popen before the arguments can be read
            yield process
            process.kill()
