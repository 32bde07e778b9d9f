"""A power cut after each thing that becomes durable: what was answered is there, and the call that was not succeeds.

A life runs once, recorded (`power_cut`). Then each state in which the power could have left its pool is given to a
driver on a node that has just booted: no mounts, no loop devices, no run directory.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.blockdriver.host import fsfreeze
from crust.core import errors, volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers import pools, remnants
from tests.support.drivers.block_driver import MIB, Bench, block, caller
from tests.support.faults import crashes, power_cut, syncs
from tests.support.records import pool_layout
from tests.support.records.copies import made_of

pytestmark = pytest.mark.root

DATA = b"every byte" * 1000
SIZE, GROWN = 32 * MIB, 48 * MIB
POOL_BYTES, SLACK_BYTES = 512 * MIB, 2 * MIB
THICK = {"crust.dev/provisioning": "thick"}


class Node:
    """A node with one driver, and a CO whose every call can be repeated, after a reboot too."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def id_of(self, name: str) -> str:
        return self.bench.ids.volume_id(name)

    async def up(self, name: str) -> Path:
        volume_id = self.id_of(name)
        await self.bench.up(volume_id, self.bench.target(name))
        return Path(self.bench.target(name), "file")

    async def down(self, name: str) -> None:
        await self.bench.down(self.id_of(name), self.bench.target(name))

    async def write(self) -> None:
        """A pod's write, which the pod syncs."""
        file = await self.up("v")
        fd = os.open(file, os.O_CREAT | os.O_WRONLY)
        os.write(fd, DATA)
        os.fsync(fd)
        os.close(fd)

    async def restore(self) -> None:
        taken = await self.bench.co.snapshot(self.id_of("v"))
        await made_of(self.bench, "restored", snapshot_id=taken.snapshot_id)

    async def drop_group(self) -> None:
        request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=self.bench.ids.group_id("g"),
            snapshot_ids=[self.bench.ids.member_id("g", self.id_of("v"))],
        )
        await self.bench.driver.controller.DeleteVolumeGroupSnapshot(request, caller())

    async def delete_copies(self) -> None:
        for name in ("restored", "cloned", "thick"):
            await self.bench.delete(self.id_of(name))

    def steps(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """The calls by their names, in the order of the life."""
        bench, volume_id = self.bench, self.id_of("v")
        return {
            "create": lambda: bench.create("v", size=SIZE),
            "stage": lambda: bench.stage(volume_id),
            "write": self.write,
            "snapshot": lambda: bench.co.snapshot(volume_id),
            "group": lambda: bench.co.group(volume_id),
            "restore": self.restore,
            "clone": lambda: made_of(bench, "cloned", volume_id=volume_id),
            "thick": lambda: made_of(bench, "thick", volume_id=volume_id, parameters=THICK),
            "expand": lambda: bench.grow(volume_id, GROWN),
            "expand_thick": lambda: bench.grow(self.id_of("thick"), GROWN),
            "unpublish": lambda: bench.unpublish(volume_id, bench.target("v")),
            "unstage": lambda: bench.unstage(volume_id),
            "drop_snapshot": lambda: bench.co.delete_snapshot(bench.ids.snapshot_id("snap")),
            "drop_group": self.drop_group,
            "delete": lambda: bench.delete(volume_id),
            "delete_copies": self.delete_copies,
        }

    async def volumes(self) -> dict[str, csi_pb2.ListVolumesResponse.Entry]:
        """What ListVolumes shows; each must be healthy."""
        listed = await self.bench.co.volumes()
        for entry in listed.values():
            condition = entry.status.volume_condition
            # Said where no process may resize a mounted ext4: it is no damage.
            assert not condition.abnormal or "keeps its old size" in condition.message, condition
        return listed

    async def snapshots(self) -> set[str]:
        """What ListSnapshots shows; each must be ready."""
        listed = await self.bench.co.snapshots()
        assert all(snapshot.ready_to_use for snapshot in listed.values())
        return set(listed)


LIFETIMES = {
    "v": ("create", "delete"),
    "restored": ("restore", "delete_copies"),
    "cloned": ("clone", "delete_copies"),
    "thick": ("thick", "delete_copies"),
}
SNAPSHOT_LIFETIMES = {"snap": ("snapshot", "drop_snapshot"), "g": ("group", "drop_group")}


class AfterTheCut:
    """The checks. `answered` names the steps that were answered, `pending` the one that was not, or nothing."""

    def __init__(self, node: Node, marks: int) -> None:
        self._node = node
        self._steps, names = node.steps(), list(node.steps())
        self._answered, self._pending = names[:marks], "".join(names[marks : marks + 1])

    async def check(self) -> None:
        """All of it; nothing is left afterwards."""
        await self._check_present()
        if self._pending:
            await self._repeat()
        await self._check_content()
        await self._remove_all()

    def _must(self, lifetime: tuple[str, str]) -> bool | None:
        """Whether it must be there; None while one of its two calls is pending."""
        made, gone = lifetime
        if self._pending in lifetime:
            return None
        return made in self._answered and gone not in self._answered

    async def _check_present(self) -> None:
        node = self._node
        volumes, snapshots = await node.volumes(), await node.snapshots()
        ids = node.bench.ids
        for name, lifetime in LIFETIMES.items():
            must = self._must(lifetime)
            assert must is None or (ids.volume_id(name) in volumes) == must, name
        snapshot_ids = {
            "snap": ids.snapshot_id("snap"),
            "g": ids.member_id("g", ids.volume_id("v")),
        }
        for name, lifetime in SNAPSHOT_LIFETIMES.items():
            must = self._must(lifetime)
            assert must is None or (snapshot_ids[name] in snapshots) == must, name
        if "expand" in self._answered and "delete" not in (*self._answered, self._pending):
            assert volumes[ids.volume_id("v")].volume.capacity_bytes == GROWN

        if ids.volume_id("thick") in volumes:
            record = node.bench.driver.stores.volume_records.load(ids.volume_id("thick"))
            assert record.thick
            if "expand_thick" in self._answered:
                assert record.capacity_bytes == GROWN

        if "stage" in self._answered and "delete" not in (*self._answered, self._pending):
            content = node.bench.driver.stores.content_records.load(ids.volume_id("v"))
            assert content.state == "formatted", "only a look at the device keeps it from mkfs"

    async def _repeat(self) -> None:
        """What a CO repeats: the call that had no answer. A kubelet stages and publishes first, after a reboot."""
        node = self._node
        if self._pending in ("unpublish", "unstage"):
            await node.up("v")
            await self._steps["unpublish"]()
        await self._steps[self._pending]()
        if self._pending == "stage":
            await self._steps["unstage"]()
        if self._pending == "write":
            await node.down("v")

    async def _check_content(self) -> None:
        """Whatever is listed can be mounted, and has what was in it."""
        node = self._node
        done = (*self._answered, self._pending)
        listed = await node.volumes()
        for name in LIFETIMES:
            if node.id_of(name) not in listed:
                continue
            file = await node.up(name)
            if "write" in done:
                assert file.read_bytes() == DATA, name
            await node.down(name)

    async def _remove_all(self) -> None:
        for step in ("drop_snapshot", "drop_group", "delete", "delete_copies"):
            await self._steps[step]()
        root = self._node.bench.root
        assert pool_layout.files(root / "state") == set()
        assert remnants.devices(root) == []


@dataclass(frozen=True, slots=True)
class DiskCut:
    """When a disk was copied: after so many answers, and whether a step was without one."""

    answered: int
    in_step: bool


class ThickLife:
    """The steps of a thick volume on a disk of its own, and what the pool has left after each."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.volume_id = bench.ids.volume_id("v")

    def steps(self) -> list[Callable[[], Awaitable[object]]]:
        bench = self.bench
        return [
            lambda: bench.create("v", block(), size=SIZE, parameters=THICK),
            self.write,
            lambda: bench.co.snapshot(self.volume_id),
            lambda: bench.grow(self.volume_id, GROWN),
            lambda: bench.co.delete_snapshot(bench.ids.snapshot_id("snap")),
            lambda: bench.delete(self.volume_id),
        ]

    async def write(self) -> None:
        with self.bench.image(self.volume_id).open("r+b") as image:
            image.write(os.urandom(SIZE))
            os.fsync(image.fileno())

    async def left(self) -> int:
        """Once the filesystem has freed all blocks of deleted files: a freeze waits for that."""
        fsfreeze.Freeze(str(self.bench.root)).thaw()
        return await self.bench.co.capacity(parameters=THICK)

    async def check(self, cut: DiskCut, lefts: list[int]) -> None:
        """As much is left as before the step without an answer, or as after it. It and the later ones run."""
        possible, left = lefts[cut.answered : cut.answered + 1 + cut.in_step], await self.left()
        assert min(abs(one - left) for one in possible) <= SLACK_BYTES, (left, possible)
        self.check_blocks()
        for number, step in enumerate(self.steps()[cut.answered :], cut.answered + 1):
            await step()
            assert abs(await self.left() - lefts[number]) <= SLACK_BYTES, number
            self.check_blocks()
        assert pool_layout.files(self.bench.root / "state") == set()

    def check_blocks(self) -> None:
        """The volume has all of its blocks, as large as its record says."""
        record = self.bench.driver.stores.volume_records.find(volumes.VolumeId(self.volume_id))
        if record is not None:
            status = self.bench.image(self.volume_id).stat()
            assert status.st_blocks * 512 >= status.st_size >= record.capacity_bytes


@pytest.mark.parametrize("fs_type", ["xfs", "ext4"])
def test_power_cut_at_any_call_keeps_thick_volume_and_sum(base: Path, fs_type: str) -> None:
    """A copy of the disk, at one moment before each call, has what the filesystem had written to it until then."""
    cuts: list[DiskCut] = []
    lefts: list[int] = []
    disks, guard = base / "disks", threading.Lock()

    def cut(*, in_step: bool = True) -> None:
        with guard:
            copy = disks / str(len(cuts))
            subprocess.run(
                ["cp", "--reflink=always", disks / "pool.backing", copy], check=True
            )  # by another process: its calls are not watched
            cuts.append(DiskCut(len(lefts) - in_step, in_step))

    async def life(bench: Bench) -> None:
        thick = ThickLife(bench)
        lefts.append(await thick.left())
        for step in thick.steps():
            with syncs.watched(crashes.CALLS, before=lambda *_: cut()):
                await step()
            cut(in_step=False)
            lefts.append(await thick.left())

    with pools.mounted("xfs", base, disks, size=16 * 1024 * MIB):
        with pools.bench_on(fs_type, disks, size=POOL_BYTES) as bench:
            asyncio.run(life(bench))
        assert len(cuts) > 30
        for number, made in enumerate(cuts):
            with pools.mounted_from(disks / str(number), fs_type, disks / "home"):
                shutil.rmtree(disks / "home" / "run")  # a reboot clears it
                bench = Bench(disks / "home")
                try:
                    asyncio.run(ThickLife(bench).check(made, lefts))
                except (errors.CrustError, AssertionError) as error:
                    raise AssertionError(f"cut {number}, {made}") from error
                finally:
                    bench.let_go()


@pytest.fixture
def base() -> Iterator[Path]:
    """In memory: thousands of files are made here, and none has to survive a power cut."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/dev/shm") as name:
        yield Path(name)
        remnants.remove(name)


@pytest.mark.parametrize("names_survive", [False, True], ids=["all lost", "names survive"])
def test_power_cut_after_anything_that_becomes_durable_loses_no_answer(
    base: Path, *, names_survive: bool
) -> None:
    store, live = base / "store", base / "live"
    store.mkdir()
    live.mkdir()

    async def life(recorder: power_cut.Recorder) -> None:
        for step in Node(Bench(live)).steps().values():
            await step()
            recorder.mark()

    with power_cut.recorded(live / "state", store, names_survive=names_survive) as recorder:
        asyncio.run(life(recorder))
    remnants.remove(base)

    assert len(recorder.cuts) > 30
    for number, cut in enumerate(recorder.cuts):
        root = base / f"cut-{number}"
        root.mkdir()
        cut.rebuild(root / "state")
        try:
            asyncio.run(AfterTheCut(Node(Bench(root)), cut.marks).check())
        except (errors.CrustError, AssertionError) as error:
            names = sorted(str(path.relative_to(root)) for path in (root / "state").rglob("*"))
            raise AssertionError(f"cut {number}, {cut.marks} answers, {names}") from error
        finally:
            remnants.remove(root)
