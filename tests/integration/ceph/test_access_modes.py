"""Each access mode, as a filesystem and raw, on a real cluster: docs/multi-node.md says what each call answers."""

import re
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.wire.csi.v1 import csi_pb2
from tests.support.ceph.rbd_node import RbdNode
from tests.support.co import capability

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


async def test_each_call_answers_what_the_page_says_and_nothing_is_left(cluster: RbdNode) -> None:
    await cluster.leave()  # the volume that the fixture has made
    differing = []
    for row in rows():
        name, given = f"{row.kind}-{row.mode}", row.capability()
        create = await answered(cluster.create(name, given))
        usual = (
            given
            if create == "OK"
            else Row(row.kind, "SINGLE_NODE_WRITER", *4 * ("",)).capability()
        )
        volume = await cluster.create(name, usual)
        assert await cluster.is_confirmed(volume, given) == (create == "OK"), row
        stage = await answered(cluster.stage(volume, given=given))
        deferred = await answered(cluster.publish(volume, cluster.own, given))
        await cluster.unpublish(volume)
        on_host = await answered(cluster.publish(volume, cluster.own, given, deferred=False))
        found = Row(row.kind, row.mode, create, stage, deferred, on_host)
        if found != row:
            differing.append((found, row))
        assert not cluster.target(volume).exists()
        await cluster.leave(volume)
    assert differing == []
    assert cluster.images() == []
