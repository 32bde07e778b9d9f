"""What Kata and the kernel say of a sandbox: which process its virtual machine is, and what that has attached.

Kata's Go runtime writes /run/vc/sbs/<sandbox>/persist.json, and one for each container below it, in place: a reader
may see half a file, and reads again. What these files say is compared with the kernel: a process is a sandbox's
virtual machine if the sandbox's id is in its arguments, its control group, or its parent's arguments, and a disk is
attached if the process has the device open. Kata's files may name a user of a device; they never prove that there is
none.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import pydantic

from crust.core import errors
from crust.handoff.record import Record
from crust.host.process import syscalls

DEFAULT_ROOT = "/run/vc/sbs"

_LIMIT_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 5
_AGAIN_S = 0.01


class VmUnknown(errors.NotReady):
    """It cannot be proved which process is the sandbox's virtual machine."""

    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(
            f"the virtual machine of sandbox {sandbox_id} cannot be told",
            why=why,
            hint="retry; if it stays so, delete the pod, and look for its hypervisor by the sandbox's id in `ps`",
        )


class _Hypervisor(pydantic.BaseModel):
    pid: int = pydantic.Field(alias="Pid", ge=0, lt=2**31)


class _SandboxFile(pydantic.BaseModel):
    hypervisor: _Hypervisor = pydantic.Field(alias="HypervisorState")


class _Mount(pydantic.BaseModel):
    source: str = pydantic.Field(alias="Source")
    destination: str = pydantic.Field(alias="Destination")
    device_id: str = pydantic.Field(alias="BlockDeviceID", default="")


class _ContainerFile(pydantic.BaseModel):
    mounts: tuple[_Mount, ...] | None = pydantic.Field(alias="Mounts", default=())


@dataclass(frozen=True, slots=True)
class KataEvidence:
    """Kata's own files below `root`, and the kernel's view. Functions block."""

    root: str = DEFAULT_ROOT

    def vm_of(self, sandbox_id: str, told: int = 0) -> int:
        """The process of the sandbox's virtual machine; `told` is the engine's word, 0 for none. Raises VmUnknown."""
        check_id(sandbox_id)
        pid: int = self._read(_SandboxFile, f"{sandbox_id}/persist.json", sandbox_id).hypervisor.pid
        if told and told != pid:
            raise VmUnknown(sandbox_id, f"the engine names process {told}, and Kata process {pid}")
        if not pid or not _belongs(pid, sandbox_id):
            raise VmUnknown(sandbox_id, f"process {pid}, which Kata names, is not the sandbox's")
        return pid

    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, destination: str, record: Record
    ) -> None:
        """Raise `VolumeNotAttached` unless Kata attached the device and mounts it for this container."""
        check_id(sandbox_id)
        check_id(container_id)
        path = f"{sandbox_id}/{container_id}/persist.json"
        mounts = self._read(_ContainerFile, path, sandbox_id).mounts or ()
        device = os.path.realpath(record.device)
        is_known = any(
            each.device_id and (each.source, each.destination) == (device, destination)
            for each in mounts
        )
        if is_known and has_open(pid, record):
            return
        missing = "has not opened" if is_known else "was not given"
        raise errors.NotReady.named(
            "VolumeNotAttached",
            f"the volume at {record.target} is not in the virtual machine of sandbox {sandbox_id}",
            why=f"process {pid} {missing} {record.device} for the mount {destination}: Kata shares the host's "
            "directory where it cannot attach a device",
            hint="set disable_block_device_use = false in Kata's configuration, and delete the pod; "
            "its process was not started",
        )

    def _read(self, model: type[Any], path: str, sandbox_id: str) -> Any:
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                with open(f"{self.root}/{path}", "rb") as file:
                    return model.model_validate(json.loads(file.read(_LIMIT_BYTES)))
            except OSError as err:
                raise VmUnknown(sandbox_id, f"{self.root}/{path}: {err.strerror}") from err
            except (ValueError, RecursionError) as err:  # it may be half written
                why = f"{self.root}/{path} cannot be read: {type(err).__name__}"
            time.sleep(_AGAIN_S)
        raise VmUnknown(sandbox_id, why)


def has_open(pid: int, record: Record) -> bool:
    """Whether the process has the record's device open now."""
    identity = record.identity
    wanted = os.makedev(identity.major, identity.minor)
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(_device_at(f"{directory}/{name}") == wanted for name in names)


def _device_at(path: str) -> int | None:
    try:
        return syscalls.block_device_at(path)
    except OSError:  # closed meanwhile
        return None


def _belongs(pid: int, sandbox_id: str) -> bool:
    wanted = sandbox_id.encode()
    status = _content(pid, "status")
    parent = next(
        (line.split()[1] for line in status.split(b"\n") if line.startswith(b"PPid:")), b"0"
    )
    said = (_content(pid, "cmdline"), _content(pid, "cgroup"), _content(int(parent), "cmdline"))
    return any(wanted in text for text in said)


def _content(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(_LIMIT_BYTES)
    except OSError:
        return b""


def check_id(text: str) -> None:
    """Raise VmUnknown for a text that is no id: it becomes a part of a path, and must not be in every text."""
    if len(text) < 8 or not text.isascii() or not text.replace("-", "").replace("_", "").isalnum():
        raise VmUnknown(text[:64], "this is not an id of a sandbox or a container")
