"""The directory of one VM: private, owned by one process at a time, and enough to find the VM again.

machine.py lists its contents. `prepare` refuses a directory that others may use or that has a running VM, and removes
the files of a VM that has ended. A process killed at any line leaves a directory that `prepare` or `reopen` accepts:
machine.json is written atomically, before QEMU is started.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pydantic

from examples.kata.vm import console, faults, process, spec

_LONGEST_SOCKET = 107  # sun_path of unix(7), its NUL left out
_SOCKETS = ("control.sock", "agent.sock")


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of machine.json: which process is the VM, and properties that QEMU cannot be asked for."""

    name: str
    uuid: str
    acceleration: spec.Acceleration
    volume_slots: int
    claims: spec.ClaimHolder = "hypervisor"


_IDENTITY = pydantic.TypeAdapter(Identity)


def prepare(directory: Path, identity: Identity) -> int:
    """Make the directory ready for a new VM and return the descriptor of its lock.

    Raises InvalidVmDirectory, VmAlreadyControlled, VmAlreadyRuns.
    """
    _check_length(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    with _locked(directory) as lock:
        _check_idle(directory)
        for entry in directory.iterdir():
            if entry.name != "owner.lock" and not entry.is_dir():
                entry.unlink()
        console.prepare(directory)
        aside = directory / ".machine.json"
        aside.write_text(json.dumps(dataclasses.asdict(identity)))
        aside.rename(directory / "machine.json")
        return os.dup(lock)


def reopen(directory: Path) -> tuple[Identity, int]:
    """The VM's identity, and the descriptor of its lock. Raises VmGone, VmAlreadyControlled, InvalidVmDirectory."""
    if not (directory / "machine.json").exists():
        raise faults.VmGone(directory, "none was started in it")
    _check_private(directory)
    with _locked(directory) as lock:
        return _read(directory), os.dup(lock)


def listen(directory: Path) -> dict[str, socket.socket]:
    """Bind and listen on the VM's sockets, so that a connection waits in the queue until QEMU accepts it."""
    listeners = {}
    for name in _SOCKETS:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / name))
        os.chmod(directory / name, 0o600)
        listener.listen(1)
        listeners[name] = listener
    return listeners


def _read(directory: Path) -> Identity:
    try:
        return _IDENTITY.validate_json((directory / "machine.json").read_bytes())
    except (pydantic.ValidationError, OSError) as err:
        raise faults.InvalidVmDirectory(directory, "its machine.json cannot be read") from err


def _check_length(directory: Path) -> None:
    longest = max(len(os.fsencode(directory / name)) for name in _SOCKETS)
    if not directory.is_absolute() or longest > _LONGEST_SOCKET:
        reason = f"a socket's path has at most {_LONGEST_SOCKET} bytes and is absolute"
        raise faults.InvalidVmDirectory(directory, reason)


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise faults.InvalidVmDirectory(directory, "it is not a directory")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise faults.InvalidVmDirectory(directory, "other users may access it")


def _check_idle(directory: Path) -> None:
    if not (directory / "machine.json").exists():
        return
    running = process.find(directory / "qemu.pid", _read(directory).uuid)
    if running is not None:
        running.close()
        raise faults.VmAlreadyRuns(directory, running.pid)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold the owner's lock; a duplicate of the descriptor keeps the lock beyond the block."""
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError as err:
        raise faults.VmAlreadyControlled(directory) from err
    finally:
        os.close(lock)
