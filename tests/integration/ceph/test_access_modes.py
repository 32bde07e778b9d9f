"""Each access mode, as a filesystem and raw, on a real cluster: docs/multi-node.md says what each call answers."""

import re
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.wire.csi.v1 import csi_pb2
from tests.integration.ceph.test_node import OPT_IN, Cluster, cluster
from tests.support.co import capability, create_request, publish_request, stage_request

__all__ = ["cluster"]

pytestmark = pytest.mark.timeout(240)

PAGE = Path(__file__).parents[3] / "docs" / "multi-node.md"
Mode = csi_pb2.VolumeCapability.AccessMode.Mode


@dataclass(frozen=True)
class Row:
    """What is said of one mode: "OK", or the name of the error."""

    kind: str
    mode: str
    create: str
    stage: str
    deferred: str
    on_host: str

    def capability(self) -> csi_pb2.VolumeCapability:
        """As a kubelet sends it."""
        return capability(block=self.kind == "raw", mode=self.mode)


def rows() -> Iterator[Row]:
    """The rows of the page, one per mode."""
    text = PAGE.read_text(encoding="utf-8").partition("### Access modes\n")[2].partition("\n###")[0]
    for line in text.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if cells[0] in ("filesystem", "raw"):
            for mode in cells[1].split(", "):
                yield Row(cells[0], mode, *cells[2:6])


def test_page_has_every_mode_of_both_kinds_once() -> None:
    modes = [each for each in Mode.keys() if each != "UNKNOWN"]  # noqa: SIM118 - no mapping
    found = [(each.kind, each.mode) for each in rows()]
    assert sorted(found) == sorted((kind, mode) for kind in ("filesystem", "raw") for mode in modes)


async def answered(call: Awaitable[Any]) -> str:
    """ "OK", or the name of the error."""
    try:
        await call
    except grpc.aio.AioRpcError as err:
        text = err.details() or "no text"
        name = re.search(r"\[(\w+)[],]", text)
        return name[1] if name else text
    return "OK"


@dataclass
class Volume:
    """A volume of its own for a row, and the calls about it."""

    cluster: Cluster
    row: Row
    volume_id: str = ""

    async def create(self, given: csi_pb2.VolumeCapability) -> None:
        """A volume."""
        request = create_request(f"{self.row.kind}-{self.row.mode}", given)
        made = await self.cluster.controller.CreateVolume(request, timeout=60)
        self.volume_id = made.volume.volume_id

    async def is_confirmed(self) -> bool:
        """What ValidateVolumeCapabilities says of the row's."""
        answer = await self.cluster.controller.ValidateVolumeCapabilities(
            csi_pb2.ValidateVolumeCapabilitiesRequest(
                volume_id=self.volume_id, volume_capabilities=[self.row.capability()]
            ),
            timeout=60,
        )
        assert answer.HasField("confirmed") or answer.message
        return bool(answer.HasField("confirmed"))

    def stage(self) -> Any:
        """NodeStageVolume."""
        self.cluster.staging.mkdir(exist_ok=True)
        return self.cluster.node.NodeStageVolume(
            stage_request(
                self.volume_id,
                str(self.cluster.staging),
                self.row.capability(),
                secrets=self.cluster.secrets,
            ),
            timeout=60,
        )

    def publish(self, *, deferred: bool) -> Any:
        """NodePublishVolume."""
        return self.cluster.node.NodePublishVolume(
            publish_request(
                self.volume_id,
                str(self.cluster.target),
                self.row.capability(),
                defer=deferred,
                staging=str(self.cluster.staging),
                secrets=self.cluster.secrets,
            ),
            timeout=60,
            metadata=OPT_IN,
        )

    async def unpublish(self) -> None:
        """NodeUnpublishVolume."""
        await self.cluster.node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(
                volume_id=self.volume_id, target_path=str(self.cluster.target)
            ),
            timeout=60,
        )

    async def leave(self) -> None:
        """Unpublish, unstage, delete."""
        await self.unpublish()
        await self.cluster.node.NodeUnstageVolume(
            csi_pb2.NodeUnstageVolumeRequest(
                volume_id=self.volume_id, staging_target_path=str(self.cluster.staging)
            ),
            timeout=60,
        )
        await self.cluster.controller.DeleteVolume(
            csi_pb2.DeleteVolumeRequest(volume_id=self.volume_id), timeout=60
        )


async def test_each_call_answers_what_the_page_says_and_nothing_is_left(cluster: Cluster) -> None:
    await cluster.leave()  # the volume that the fixture has made
    differing = []
    for row in rows():
        volume = Volume(cluster, row)
        create = await answered(volume.create(row.capability()))
        if create != "OK":
            usual = Row(row.kind, "SINGLE_NODE_WRITER", "", "", "", "")
            await volume.create(usual.capability())
        assert await volume.is_confirmed() == (create == "OK"), row
        stage = await answered(volume.stage())
        deferred = await answered(volume.publish(deferred=True))
        await volume.unpublish()
        on_host = await answered(volume.publish(deferred=False))
        found = Row(row.kind, row.mode, create, stage, deferred, on_host)
        if found != row:
            differing.append((found, row))
        await volume.leave()
    assert differing == []
    assert cluster.images() == []
    assert not cluster.target.exists()
