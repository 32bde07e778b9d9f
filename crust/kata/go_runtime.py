"""Kata's Go runtime: its state files, and statistics by the HTTP socket of Kata's shim.

The runtime writes /run/vc/sbs/<sandbox>/persist.json, and one for each container below it, in place: a reader may see
half a file, and reads again.
"""

import asyncio
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf import json_format

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.block import openers
from crust.host.process import workers
from crust.kata import evidence
from crust.kata.evidence import Kind, Use, VmUnknown
from crust.wire.kata.v1 import agent_pb2

_LIMIT_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 5
_AGAIN_S = 0.01
_Told = TypeVar("_Told")


class GoRuntime(evidence.KataBuild):
    """The Go runtime counts the containers that use a device, and its shim reports statistics by the device."""

    kind = Kind.GO

    def vm_of(self, sandbox_id: str, engine_pid: int = 0) -> int:
        evidence.check_id(sandbox_id)
        pid = self._read(f"{sandbox_id}/persist.json", sandbox_id, _pid)
        evidence.check_machine(sandbox_id, pid, engine_pid)
        return pid

    def check_attachable(
        self, sandbox_id: str, pid: int, mounts: Sequence[tuple[Record, int]], until_s: float
    ) -> None:
        """See `evidence.KataBuild`. An annotation of the pod can override the configuration."""
        shares, driver = self._read(f"{sandbox_id}/persist.json", sandbox_id, _disks)
        what = f"the volume at {mounts[0][0].target} cannot be given to sandbox {sandbox_id}"
        if driver == "nvdimm":
            raise errors.NotReady.named(
                "SandboxWithNvdimm",
                what,
                why="Kata has started it with block_device_driver nvdimm, which attaches a read-only volume writable",
            )
        if shares:
            raise errors.NotReady.named(
                "SandboxWithoutBlockDevices",
                what,
                why="Kata has started it with disable_block_device_use, and would share the host's directory",
            )

    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, mounts: Mapping[str, Record]
    ) -> None:
        evidence.check_id(sandbox_id)
        evidence.check_id(container_id)
        path = f"{sandbox_id}/{container_id}/persist.json"
        attached = self._read(path, sandbox_id, _attached)
        opened = openers.opened_by(pid, [record.identity for record in mounts.values()])
        for destination, record in mounts.items():
            is_known = (os.path.realpath(record.device), destination) in attached
            if is_known and record.identity in opened:
                continue
            missing = "has not opened" if is_known else "was not given"
            why = f"process {pid} {missing} {record.device} for {destination}: Kata shares a directory then"
            raise evidence.not_attached(record, sandbox_id, why)

    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        device = await workers.run(os.path.realpath, record.device)
        quoted = urllib.parse.quote(urllib.parse.quote(device, safe=""), safe="")  # decoded twice
        async with asyncio.timeout(evidence.ANSWER_S):
            body = await self.ask_shim(use.sandbox_id, f"/direct-volume/stats?path={quoted}")
        return parsed(body)

    def _read(self, path: str, sandbox_id: str, take: Callable[[Any], _Told]) -> _Told:
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                with open(f"{self.root}/{path}", "rb") as file:
                    return take(json.loads(file.read(_LIMIT_BYTES)))
            except OSError as err:
                raise VmUnknown(sandbox_id, f"{self.root}/{path}: {err.strerror}") from err
            except (ValueError, LookupError, TypeError, RecursionError) as err:  # half written
                why = f"{self.root}/{path} cannot be read: {type(err).__name__}"
            time.sleep(_AGAIN_S)
        raise VmUnknown(sandbox_id, why)


def _pid(sandbox: Any) -> int:
    pid = sandbox["HypervisorState"]["Pid"]
    if type(pid) is not int or not 0 <= pid < 2**31:
        raise ValueError(pid)
    return pid


def _disks(sandbox: Any) -> tuple[bool, str]:
    """Whether Kata shares directories in the place of disks; the driver of its disks."""
    hypervisor = sandbox["Config"]["HypervisorConfig"]
    return hypervisor["DisableBlockDeviceUse"] is not False, hypervisor["BlockDeviceDriver"]


def _attached(container: Any) -> set[tuple[str, str]]:
    """Source and destination of each mount that Kata attached a device for."""
    mounts = container["Mounts"] or ()
    return {(mount["Source"], mount["Destination"]) for mount in mounts if mount["BlockDeviceID"]}


def parsed(body: bytes) -> volumes.VolumeStats:
    """The numbers of the shim's answer: the agent's message in JSON. Raises ValueError for other bytes."""
    answer = agent_pb2.VolumeStatsResponse()
    try:
        json_format.Parse(body, answer, ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as err:
        raise ValueError("an answer that cannot be read") from err
    return evidence.stats_of(answer)
