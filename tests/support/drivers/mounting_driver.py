"""A fake driver that shows its mounts: a file on the target, over the guard or not; and what it has staged.

The target of a raw block volume is a file, as CSI says.

It can be downgraded: then it neither advertises deferral nor knows the flag, and mounts on the host.
"""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import Context, FakeDriver, device_of
from tests.support.nodes.fake_targets import MOUNTED


class MountingDriver(FakeDriver):
    """Keeps its state when it is stopped and served again, as a driver does on its disk."""

    def __init__(self, sizes_file: str) -> None:
        super().__init__()
        self._sizes_file = sizes_file
        self.leaves = ""
        """A file that an unpublish leaves in the target."""
        self.staged: set[tuple[str, str]] = set()
        self.hangs: asyncio.Event | None = None
        """Calls are accepted, and go on when this event is set."""

    def downgrade(self, *, to_old: bool) -> None:
        """Make it an old driver, or a new one again."""
        self.defers, self.mounts_instead = not to_old, to_old

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        answer = await super().NodePublishVolume(request, context)
        if request.volume_capability.HasField("block"):
            Path(request.target_path).touch()
        elif not self.published[request.target_path].deferred:
            os.makedirs(request.target_path, exist_ok=True)
            Path(request.target_path, MOUNTED).touch()
        return answer

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        target = Path(request.target_path)
        mounted = target / MOUNTED
        answer = await super().NodeUnpublishVolume(request, context)
        if target.is_file():
            target.unlink()
        elif self.leaves:
            (target / self.leaves).touch()
        elif mounted.exists():
            mounted.unlink()
            with contextlib.suppress(OSError):
                os.rmdir(request.target_path)
        return answer

    async def NodeStageVolume(
        self, request: csi_pb2.NodeStageVolumeRequest, context: Context
    ) -> csi_pb2.NodeStageVolumeResponse:
        answer = await super().NodeStageVolume(request, context)
        self.staged.add((request.volume_id, request.staging_target_path))
        return answer

    async def NodeUnstageVolume(
        self, request: csi_pb2.NodeUnstageVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnstageVolumeResponse:
        answer = await super().NodeUnstageVolume(request, context)
        self.staged.discard((request.volume_id, request.staging_target_path))
        return answer

    async def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        answer = await super().NodeExpandVolume(request, context)
        sizes = {device_of(each): size for each, size in self.size_bytes.items()}
        Path(f"{self._sizes_file}.new").write_text(json.dumps(sizes), encoding="utf-8")
        os.rename(f"{self._sizes_file}.new", self._sizes_file)
        return answer

    async def _enter(self, method: str, request: Any, context: Context) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        await super()._enter(method, request, context)
