"""A power cut of a driver with two pools: what each has, and has promised, is what was answered for it."""

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.blockdriver import serve
from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.engines import files, pool_access
from crust.blockdriver.records.node_state import AttachSlots
from crust.core import errors
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB, Co, encoded
from tests.support.drivers import remnants
from tests.support.drivers.block_driver import block
from tests.support.faults import power_cut
from tests.support.records import pool_layout

pytestmark = pytest.mark.root

SIZE, GROWN = 8 * MIB, 12 * MIB
POOLS = ("default", "fast")
RAW = encoded(block())
LIFE = (
    (("default", "create", "a"), ("fast", "create", "a")),
    (("default", "snapshot", "a"), ("fast", "thick", "b")),
    (("default", "thick", "c"), ("fast", "snapshot", "a")),
    (("default", "grow", "a"), ("fast", "drop", "a")),
    (("default", "drop", "a"), ("fast", "grow", "b")),
    (("default", "delete", "c"), ("fast", "delete", "a")),
    (("default", "delete", "a"), ("fast", "delete", "b")),
)
"""The calls of each step are made at once: pool, call, and the name of the volume."""


class Node:
    """The driver of both pools, and a CO whose every call can be repeated."""

    def __init__(self, co: Co, drivers: dict[str, Driver]) -> None:
        self.co = co
        self.drivers = drivers

    async def do(self, step: int) -> None:
        """The calls of a step."""
        await asyncio.gather(*(self._call(*call) for call in LIFE[step]))

    def id_of(self, pool: str, name: str) -> str:
        return self.drivers[pool].stores.pool.ids.volume_id(name)

    async def _call(self, pool: str, call: str, name: str) -> None:
        volume_id = self.id_of(pool, name)
        match call:
            case "create" | "thick":
                kind = {"crust.dev/provisioning": "thick" if call == "thick" else "thin"}
                await self.co.create(name, RAW, size=SIZE, parameters={POOL: pool} | kind)
            case "snapshot":
                await self.co.snapshot(volume_id, name)
            case "grow":
                await self.co.grow(volume_id, GROWN, volume_capability=RAW)
            case "drop":
                snapshot_id = self.drivers[pool].stores.pool.ids.snapshot_id(name)
                await self.co.delete_snapshot(snapshot_id)
            case "delete":
                await self.co.delete(volume_id)

    async def check(self, answered: int) -> None:
        """Each pool lists what it was answered for, and has its size reserved, and no more."""
        listed = await self.co.volumes()
        for pool in POOLS:
            own = {
                volume_id: entry.volume
                for volume_id, entry in listed.items()
                if pool_access.pool_of(volume_id) == self.drivers[pool].stores.pool.ids.pool_id
            }
            self._check_volumes(pool, own, answered)
            reserved = self.drivers[pool].stores.capacity.measured()["reserved"]
            assert reserved == sum(volume.capacity_bytes for volume in own.values()), pool

    def _check_volumes(self, pool: str, own: dict[str, csi_pb2.Volume], answered: int) -> None:
        must = dict[str, int]()
        for step in LIFE[:answered]:
            for of, call, name in step:
                if of == pool and call in ("create", "thick", "grow"):
                    must[name] = GROWN if call == "grow" else SIZE
                elif (of, call) == (pool, "delete"):
                    del must[name]
        pending = {
            name for step in LIFE[answered : answered + 1] for of, _, name in step if of == pool
        }
        sizes = {name: size for name, size in must.items() if name not in pending}
        settled = own.keys() - {self.id_of(pool, name) for name in pending}
        assert settled == {self.id_of(pool, name) for name in sizes}, pool
        for name, size in sizes.items():
            assert own[self.id_of(pool, name)].capacity_bytes == size, (pool, name)


@asynccontextmanager
async def served(disks: Path, run: Path) -> AsyncIterator[Node]:
    """The pools on `disks`, by a driver that has just started."""
    slots = AttachSlots("node-1", 10)
    drivers = {
        name: build(
            engine=files.engine(f"{disks}/{name}/state", create=True),
            run_dir=f"{run}/{name}",
            node_id="node-1",
            target_roots=(str(run),),
            pool_name=name,
            attach_slots=slots,
        )
        for name in POOLS
    }
    driver = dataclasses.replace(drivers["default"], further={"fast": drivers["fast"]})
    socket = f"{run}/csi.sock"
    async with (
        serve.running(driver, socket=socket, run_dir=f"{run}/run"),
        channel.connect(socket) as connected,
    ):
        yield Node(Co(connected), drivers)


@pytest.fixture
def base() -> Iterator[Path]:
    """In memory, as the model of a disk is."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/dev/shm") as name:
        yield Path(name)
        remnants.remove(name)


async def live(disks: Path, run: Path, recorder: power_cut.Recorder) -> None:
    async with served(disks, run) as node:
        for step in range(len(LIFE)):
            await node.do(step)
            recorder.mark()


async def go_on(disks: Path, run: Path, answered: int) -> None:
    """Look at what the cut has left, and make the calls that had no answer, and all later ones."""
    async with served(disks, run) as node:
        await node.check(answered)
        for step in range(answered, len(LIFE)):
            await node.do(step)
            await node.check(step + 1)
    for name in POOLS:
        assert pool_layout.files(disks / name / "state") == set()


@pytest.mark.parametrize("names_survive", [False, True], ids=["all lost", "names survive"])
def test_power_cut_leaves_each_of_two_pools_its_answers(base: Path, *, names_survive: bool) -> None:
    disks, store, run = base / "disks", base / "store", base / "run"
    for path in (store, run, *(disks / name / "state" for name in POOLS)):
        path.mkdir(parents=True, mode=0o700)
    with power_cut.recorded(disks, store, names_survive=names_survive) as recorder:
        asyncio.run(live(disks, run, recorder))
    assert len(recorder.cuts) > 20
    for number, cut in enumerate(recorder.cuts):
        root = base / f"cut-{number}"
        (root / "run").mkdir(parents=True)
        cut.rebuild(root / "disks")
        try:
            asyncio.run(go_on(root / "disks", root / "run", cut.marks))
        except (errors.CrustError, AssertionError) as error:
            names = sorted(str(path.relative_to(root)) for path in (root / "disks").rglob("*"))
            raise AssertionError(f"cut {number}, {cut.marks} answers, {names}") from error
        finally:
            remnants.remove(root)
