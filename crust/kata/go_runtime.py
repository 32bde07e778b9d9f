"""Kata's Go runtime: its state files, and statistics by the HTTP socket of its shim.

The runtime writes /run/vc/sbs/<sandbox>/persist.json, and one for each container below it, in place: a reader may see
half a file, and reads again.
"""

import asyncio
import json
import os
import time
import urllib.parse
from typing import Any

import pydantic
from google.protobuf import json_format

from crust.core import volumes
from crust.handoff.record import Record
from crust.host.process import workers
from crust.kata import evidence, shim_socket
from crust.kata.evidence import Kind, Use, VmUnknown
from crust.wire.kata.v1 import agent_pb2

_LIMIT_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 5
_AGAIN_S = 0.01


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


class GoRuntime(evidence.Runtime):
    """It counts the containers that use a device, and its shim is asked by the device."""

    kind = Kind.GO

    def vm_of(self, sandbox_id: str, told: int = 0) -> int:
        """See `evidence.Runtime`."""
        evidence.check_id(sandbox_id)
        pid: int = self._read(_SandboxFile, f"{sandbox_id}/persist.json", sandbox_id).hypervisor.pid
        evidence.check_machine(sandbox_id, pid, told)
        return pid

    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, destination: str, record: Record
    ) -> None:
        """See `evidence.Runtime`."""
        evidence.check_id(sandbox_id)
        evidence.check_id(container_id)
        path = f"{sandbox_id}/{container_id}/persist.json"
        mounts = self._read(_ContainerFile, path, sandbox_id).mounts or ()
        device = os.path.realpath(record.device)
        is_known = any(
            each.device_id and (each.source, each.destination) == (device, destination)
            for each in mounts
        )
        if is_known and evidence.has_open(pid, record):
            return
        missing = "has not opened" if is_known else "was not given"
        raise evidence.not_attached(
            record,
            sandbox_id,
            f"process {pid} {missing} {record.device} for the mount {destination}: Kata shares the host's "
            "directory where it cannot attach a device",
            "set disable_block_device_use = false in Kata's configuration, and delete the pod",
        )

    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        """See `evidence.Runtime`."""
        device = await workers.run(os.path.realpath, record.device)
        quoted = urllib.parse.quote(urllib.parse.quote(device, safe=""), safe="")  # decoded twice
        socket = f"{self.root}/{use.sandbox_id}/shim-monitor.sock"
        async with asyncio.timeout(shim_socket.ANSWER_S):
            body = await shim_socket.get(socket, f"/direct-volume/stats?path={quoted}")
        return parsed(body)

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


def parsed(body: bytes) -> volumes.VolumeStats:
    """The numbers of the shim's answer: the agent's message in JSON. Raises ValueError for other bytes."""
    answer = agent_pb2.VolumeStatsResponse()
    try:
        json_format.Parse(body, answer, ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as err:
        raise ValueError("an answer that cannot be read") from err
    return shim_socket.stats(answer)
