"""Images as disks: what QEMU is told, by a control that refuses what QEMU would refuse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from crust import errors, volumes
from examples.kata.vm import disks, faults, images, qmp

IMAGE = volumes.NetworkImage("fsid", "pool", "", "vol-1", ("127.0.0.1:3300",), "user")


class Control:
    """QEMU's objects, block nodes and devices by name."""

    def __init__(self) -> None:
        self.objects: set[str] = set()
        self.nodes: set[str] = set()
        self.devices: set[str] = set()

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> object:
        given = arguments or {}
        match command:
            case "object-add":
                self._add(command, self.objects, given["id"])
            case "object-del":
                self._remove(command, self.objects, given["id"])
            case "blockdev-add":
                self._add(command, self.nodes, given["node-name"])
            case "device_add":
                self._add(command, self.devices, given["id"])
            case "blockdev-del":
                self._remove(command, self.nodes, given["node-name"])
            case "qom-list":
                return [{"name": each} for each in self.devices]
            case "query-named-block-nodes":
                return [self._node(each) for each in self.nodes]
        return {}

    @staticmethod
    def _node(name: str) -> dict[str, object]:
        size = {"virtual-size": 1 << 20}
        return {"node-name": name, "image": size, "cache": {"direct": True}, "drv": "rbd"}

    @staticmethod
    def _add(command: str, where: set[str], name: str) -> None:
        if name in where:
            raise faults.QemuCommandFailed(command, f"{name} exists")
        where.add(name)

    @staticmethod
    def _remove(command: str, where: set[str], name: str) -> None:
        if name not in where:
            raise faults.QemuCommandFailed(command, f"{name} not found")
        where.remove(name)


async def _recorded() -> None:
    """As `ports.TakenImage.record`."""


@pytest.mark.spec("H-54")
@pytest.mark.parametrize("plugged", [False, True])
async def test_key_that_a_killed_process_left_in_qemu_is_removed_and_blocks_no_attach(
    tmp_path: Path, *, plugged: bool
) -> None:
    control = Control()
    found = disks.Disks(cast("qmp.Qmp", control), 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    if plugged:
        await found.attach_image("s1", opened, _recorded, read_only=False)
    control.objects.add("key.s1")
    disk = await found.attach_image("s1", opened, _recorded, read_only=False)
    assert disk.serial == "s1"
    assert control.objects == set()
    assert await found.serials() == ("s1",)


@pytest.mark.spec("H-52", "H-55")
@pytest.mark.parametrize("answers", [False, True])
async def test_image_whose_client_is_not_recorded_is_closed_unless_that_would_wait_for_the_cluster(
    tmp_path: Path, *, answers: bool
) -> None:
    async def not_recorded() -> None:
        raise errors.NotReady("cut off") if answers else errors.PeerUnavailable("no answer")

    found = disks.Disks(cast("qmp.Qmp", Control()), 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    with pytest.raises(errors.NotReady if answers else errors.PeerUnavailable):
        await found.attach_image("s1", opened, not_recorded, read_only=False)
    assert await found.has_open("s1") is not answers
    assert await found.serials() == ()
    await found.attach_image("s1", opened, _recorded, read_only=False)
    assert await found.serials() == ("s1",)
