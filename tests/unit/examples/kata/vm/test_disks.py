"""Images as disks: what QEMU is told, by a control that refuses what QEMU would refuse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from crust.core import errors, volumes
from examples.kata.vm import descriptors, disks, faults, images, qmp

IMAGE = volumes.NetworkImage("fsid", "pool", "", "vol-1", ("127.0.0.1:3300",), "user")


class Control:
    """QEMU's objects, block nodes and devices by name."""

    def __init__(self) -> None:
        self.objects: set[str] = set()
        self.nodes: set[str] = set()
        self.devices: set[str] = set()
        self.asked: list[str] = []
        self.size_bytes = 1 << 20

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> object:
        given = arguments or {}
        changed = {
            "object-add": (self._add, self.objects, "id"),
            "object-del": (self._remove, self.objects, "id"),
            "blockdev-add": (self._add, self.nodes, "node-name"),
            "blockdev-del": (self._remove, self.nodes, "node-name"),
            "device_add": (self._add, self.devices, "id"),
        }
        if command in changed:
            change, where, name = changed[command]
            change(command, where, given[name])
        self.asked.append(command)
        answers: dict[str, object] = {
            "qom-list": [{"name": device} for device in self.devices],
            "query-blockstats": [{"node-name": node} for node in self.nodes],
            "query-named-block-nodes": [self._node(node) for node in self.nodes],
        }
        return answers.get(command, {})

    def _node(self, name: str) -> dict[str, object]:
        size = {"virtual-size": self.size_bytes}
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
async def test_key_left_in_qemu_is_removed_and_blocks_no_attach(
    tmp_path: Path, *, plugged: bool
) -> None:
    control = Control()
    vm_disks = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    if plugged:
        await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    control.objects.add("key.s1")
    disk = await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    assert disk.serial == "s1"
    assert control.objects == set()
    assert await vm_disks.serials() == ("s1",)


@pytest.mark.spec("H-52", "H-55")
@pytest.mark.parametrize("answers", [False, True])
async def test_image_without_recorded_client_is_closed_if_cluster_answers(
    tmp_path: Path, *, answers: bool
) -> None:
    async def not_recorded() -> None:
        raise errors.NotReady("cut off") if answers else errors.PeerUnavailable("no answer")

    vm_disks = disks.Disks(cast("qmp.Qmp", Control()), tmp_path, 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    with pytest.raises(errors.NotReady if answers else errors.PeerUnavailable):
        await vm_disks.attach_image("s1", opened, not_recorded, read_only=False)
    assert await vm_disks.has_open("s1") is not answers
    assert await vm_disks.serials() == ()
    await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    assert await vm_disks.serials() == ("s1",)


@pytest.mark.spec("H-55")
async def test_known_disk_is_queried_without_waiting_for_its_cluster(
    tmp_path: Path,
) -> None:
    """query-block and query-named-block-nodes read from the image, in QEMU's main loop."""
    control = Control()
    vm_disks = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    await vm_disks.limit("s1", volumes.IoLimits(read_iops=7))
    control.asked.clear()
    assert (await vm_disks.disk("s1")).size_bytes == 1 << 20
    assert await vm_disks.limits("s1") == volumes.IoLimits(read_iops=7)
    assert await vm_disks.has_open("s1")
    await descriptors.HeldDescriptors(cast("qmp.Qmp", control), 1).held()
    assert set(control.asked) == {"qom-list", "query-blockstats"}


@pytest.mark.spec("H-35")
async def test_size_of_image_is_asked_for_before_it_is_changed(tmp_path: Path) -> None:
    """Its controller may have grown it since, and a smaller size would cut it off."""
    control = Control()
    vm_disks = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    control.size_bytes = 4 << 20
    with pytest.raises(faults.DiskNotGrown):
        await vm_disks.resize("s1", 2 << 20)
    assert "block_resize" not in control.asked
    assert await vm_disks.resize("s1", 8 << 20) == 8 << 20


@pytest.mark.spec("H-55")
async def test_adoption_of_vm_does_not_wait_for_its_cluster(
    tmp_path: Path,
) -> None:
    control = Control()
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    earlier = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    await earlier.attach_image("s1", opened, _recorded, read_only=False)
    await earlier.resize("s1", 8 << 20)
    control.asked.clear()
    vm_disks = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    assert (await vm_disks.disk("s1")).size_bytes == 8 << 20
    adopted = await vm_disks.attach_image("s1", opened, _recorded, read_only=False)
    assert (adopted.driver, adopted.read_only) == ("rbd", False)
    assert set(control.asked) == {"qom-list", "query-blockstats"}


@pytest.mark.spec("H-55")
async def test_note_of_disk_goes_with_it_and_damaged_is_rebuilt(
    tmp_path: Path,
) -> None:
    control = Control()
    opened = images.OpenedImage(IMAGE, tmp_path / "ceph.conf", "a2V5")
    await disks.Disks(cast("qmp.Qmp", control), tmp_path, 2).attach_image(
        "s1", opened, _recorded, read_only=False
    )
    [note] = tmp_path.glob("disk-*.json")
    note.write_text("{")
    vm_disks = disks.Disks(cast("qmp.Qmp", control), tmp_path, 2)
    assert (await vm_disks.disk("s1")).size_bytes == control.size_bytes
    control.devices.clear()  # QEMU has unplugged it
    await vm_disks.detach("s1", 1)
    assert control.nodes == set()
    assert not note.exists()
