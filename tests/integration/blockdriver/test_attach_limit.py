"""What others have attached lowers the attach limit, now and not at the start; a volume on its way never does."""

from pathlib import Path

import pytest

from crust import volumes
from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.records import published_nodes
from crust.host.block import loop, loop_devices, loopctl
from crust.host.mounts import mount_capacity
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, caller

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of this machine attach devices while the tests run: they are left out."""
    sized = loopctl.sized_numbers

    def below() -> list[int]:
        return [each for each in sized() if _backing(each).startswith(f"{tmp_path}/")]

    monkeypatch.setattr(loopctl, "sized_numbers", below)


def _backing(number: int) -> str:
    try:
        return loopctl.backing_file(number)
    except OSError:
        return ""


def engine(bench: Bench) -> FileAccess:
    backend = bench.driver.stores.access
    assert isinstance(backend, FileAccess)
    return backend


async def staged(bench: Bench, name: str = "pvc-1") -> volumes.VolumeId:
    volume_id = volumes.VolumeId((await bench.create(name)).volume_id)
    await bench.stage(volume_id)
    return volume_id


async def limits(bench: Bench) -> tuple[int, int]:
    """By the node part and by the controller part."""
    node = await bench.driver.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), caller())
    asked = csi_pb2.ControllerGetNodeInfoRequest(node_id=node.node_id)
    told = await bench.driver.controller.ControllerGetNodeInfo(asked, caller())
    return node.max_volumes_per_node, told.max_volumes_per_node


@pytest.mark.spec("N-4", "N-6")
async def test_loop_device_of_another_program_lowers_the_limit_while_it_is_attached(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_capacity, "max_volumes", lambda: 8)
    volume_id = await staged(bench)
    other = tmp_path / "disk.img"
    other.write_bytes(bytes(MIB))
    assert await limits(bench) == (8, 8)
    stranger = loop.attach(str(other))
    assert await limits(bench) == (7, 7)
    assert engine(bench).attach_limit(1) == loop_devices.numbers() - 1
    bench.restart()
    assert await limits(bench) == (7, 7)
    loop.detach(stranger)
    assert await limits(bench) == (8, 8)
    await bench.unstage(volume_id)


async def test_loop_device_by_hand_on_a_volumes_image_is_foreign(bench: Bench) -> None:
    volume_id = await staged(bench)
    image = engine(bench).attached(volume_id)
    assert image is not None
    device = loop.attach(str(bench.root / "state" / "images" / f"{volume_id}.img"))
    assert engine(bench).foreign_attachments() == 1
    loop.detach(device)
    assert engine(bench).foreign_attachments() == 0
    await bench.unstage(volume_id)


@pytest.mark.spec("N-7")
async def test_volume_whose_attach_is_not_finished_is_not_foreign(bench: Bench) -> None:
    """Between the kernel's attach and the engine's own note of it."""
    volume_id = await staged(bench)
    engine(bench)._known.pop(volume_id)
    assert engine(bench).foreign_attachments() == 0
    await bench.unstage(volume_id)


@pytest.mark.spec("N-7")
@pytest.mark.parametrize("comes", [False, True], ids=["goes", "goes and another comes"])
async def test_volume_that_is_detached_between_two_looks_is_not_foreign(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, comes: bool
) -> None:
    gone, other = await staged(bench), await staged(bench, "pvc-2")
    engine(bench).detach(other)
    listed, looks = loopctl.sized_numbers, 0

    def changing() -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 2 and comes:  # it gets the number that has become free
            engine(bench).attach(other)
        found = listed()
        if looks == 1:
            engine(bench).detach(gone)
        return found

    monkeypatch.setattr(loopctl, "sized_numbers", changing)
    assert engine(bench).foreign_attachments() == 0
    assert looks == 2
    engine(bench).detach(other)


class _Reads:
    """How often the kernel was asked which loop devices are attached, and by what file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists = self.files = 0
        self._listed, self._file = loopctl.sized_numbers, loopctl.backing_file
        monkeypatch.setattr(loopctl, "sized_numbers", self._list)
        monkeypatch.setattr(loopctl, "backing_file", self._backing_file)

    def _list(self) -> list[int]:
        self.lists += 1
        return self._listed()

    def _backing_file(self, number: int) -> str:
        self.files += 1
        return self._file(number)


@pytest.mark.parametrize(
    ("limit", "lists", "files"), [(1_000_000, 0, 0), (3, 2, 1)], ids=["far below the limit", "near"]
)
async def test_attach_slots_read_the_devices_of_others_at_most_once(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    lists: int,
    files: int,
) -> None:
    """The one look: the list, the name of the stranger's file, and the list again, for what has gone meanwhile."""
    monkeypatch.setattr(mount_capacity, "max_volumes", lambda: limit)
    present = await staged(bench)  # the first volume always has a slot
    volume_id = volumes.VolumeId((await bench.create("pvc-2")).volume_id)
    other = tmp_path / "disk.img"
    other.write_bytes(bytes(MIB))
    stranger = loop.attach(str(other))
    mine = loopctl.sized_numbers()  # `alone` reads each file's name itself
    monkeypatch.setattr(loopctl, "sized_numbers", lambda: mine)
    reads = _Reads(monkeypatch)
    with bench.driver.node_rules.node_stage.attach_slots.taking(volume_id):
        assert (reads.lists, reads.files) == (lists, files)
    loop.detach(stranger)
    await bench.unstage(present)


async def test_last_slot_is_given_and_the_next_attach_is_refused_beside_a_stranger(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower bound says that there is none: more devices exist than are attached."""
    monkeypatch.setattr(mount_capacity, "max_volumes", lambda: 3)
    other = tmp_path / "disk.img"
    other.write_bytes(bytes(MIB))
    stranger = loop.attach(str(other))
    assert bench.driver.node_rules.live.attach_limit_at_least() <= 2
    first, second = await staged(bench), await staged(bench, "pvc-2")
    third = volumes.VolumeId((await bench.create("pvc-3")).volume_id)
    slots = bench.driver.node_rules.node_stage.attach_slots
    with pytest.raises(published_nodes.AttachLimitReached), slots.taking(third):
        pytest.fail("it was given a slot")
    loop.detach(stranger)
    for each in (first, second):
        await bench.unstage(each)
