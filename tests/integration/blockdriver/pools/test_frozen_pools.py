"""Pools of other versions of the driver: the present layout and the one before are opened, others are refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.blockdriver import serve
from crust.blockdriver.driver import build
from crust.blockdriver.engines import files
from crust.blockdriver.engines.files import pool
from crust.rpc import channel
from tests.support.co import MIB, Co
from tests.support.drivers.block_driver import Bench
from tests.support.records import frozen_pools
from tests.support.records.frozen_pools import NEW_NUMBER, Frozen, check_has

BEFORE = pool.SCHEMA - 1
OLDER = [frozen_pools.load(schema) for schema in range(1, BEFORE)]
PRESENT = frozen_pools.load(pool.SCHEMA)
SECTOR_BYTES = 512


def with_number(frozen: Frozen, number: int) -> Frozen:
    identity = frozen["pool.json"]
    changed = json.dumps(json.loads(identity.text) | {"schema": number})
    return frozen | {"pool.json": replace(identity, text=changed, size=len(changed))}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


@asynccontextmanager
async def served(root: Path, *, create_pool: bool = False) -> AsyncIterator[Co]:
    """The calls of a driver that serves the pool in `state`."""
    run_dir, socket = f"{root}/run", f"{root}/csi.sock"
    driver = build(
        engine=files.engine(f"{root}/state", create=create_pool),
        run_dir=run_dir,
        node_id="n",
        target_roots=(str(root),),
    )
    async with (
        serve.running(driver, socket=socket, run_dir=run_dir),
        channel.connect(socket) as connected,
    ):
        yield Co(connected)


async def check_refused(root: Path, volume_id: str, *, create_pool: bool) -> None:
    async with served(root, create_pool=create_pool) as co:
        assert not await co.is_ready()
        snapshot_id = volume_id.replace("-", "-snap-")
        for call in (
            co.volumes(),
            co.snapshots(),
            co.delete(volume_id),
            co.delete_snapshot(snapshot_id),
            co.unstage(volume_id, f"{root}/staging"),
            co.unpublish(volume_id, f"{root}/target"),
            co.grow(volume_id, 32 * MIB),
            co.detach(volume_id, "node-1"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="UnknownPoolLayout") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def files_of(state: Path) -> dict[str, Any]:
    return {
        path: (of, (state / path).lstat().st_ino, (state / path).lstat().st_mtime_ns)
        for path, of in frozen_pools.taken(state).items()
    }


@pytest.mark.parametrize("create_pool", [False, True])
@pytest.mark.parametrize(
    "frozen",
    [
        *OLDER,
        OLDER[0] | {"pool.json": PRESENT["pool.json"]},
        with_number(PRESENT, 1),
        with_number(PRESENT, pool.SCHEMA + 1),
    ],
    ids=[
        *(f"schema {number}" for number in range(1, BEFORE)),
        "present identity by hand",
        "earlier number",
        "later number",
    ],
)
async def test_pool_of_another_layout_is_refused_and_not_touched(
    state: Path, frozen: Frozen, *, create_pool: bool
) -> None:
    frozen_pools.lay_out(frozen, state)
    before = files_of(state)
    await check_refused(state.parent, frozen_pools.volume_id(frozen), create_pool=create_pool)
    assert files_of(state) == before


@pytest.mark.parametrize("schema", [BEFORE, pool.SCHEMA])
def test_pool_of_this_or_the_earlier_layout_is_opened(state: Path, schema: int) -> None:
    frozen_pools.lay_out(frozen_pools.load(schema), state)
    identity = (state / "pool.json").read_bytes()
    bench = Bench(state.parent)
    frozen_pools.check_read(bench.driver.stores)
    bench.let_go()
    assert (state / "pool.json").read_bytes() == identity, "it stays one for the version before"


async def test_pool_is_made_in_the_layout_that_its_schema_names(state: Path) -> None:
    """A field may be added to a record; each other difference needs a new number."""
    identity = {"pool.json": PRESENT["pool.json"]}
    frozen_pools.lay_out(identity, state)
    bench = Bench(state.parent)
    await frozen_pools.fill(bench)
    bench.let_go()
    made = frozen_pools.taken(state)
    assert made.keys() == PRESENT.keys(), NEW_NUMBER
    for path, of in PRESENT.items():
        assert made[path].mode == of.mode, f"{path}: {NEW_NUMBER}"
        if not of.is_record:
            assert made[path].size == of.size, f"{path}: {NEW_NUMBER}"
            continue
        if of.size == SECTOR_BYTES:
            assert made[path].size == max(SECTOR_BYTES, len(made[path].text)), path
        check_has(json.loads(made[path].text), json.loads(of.text), path)


def test_identity_of_a_new_pool_has_the_frozen_fields(state: Path) -> None:
    bench = Bench(state.parent)
    bench.let_go()
    made, frozen = (
        json.loads(text) for text in ((state / "pool.json").read_text(), PRESENT["pool.json"].text)
    )
    assert made.keys() >= frozen.keys(), NEW_NUMBER
    assert made["schema"] == frozen["schema"] == pool.SCHEMA
