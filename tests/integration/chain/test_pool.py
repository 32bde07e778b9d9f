"""`crust pool`: what a real driver's pool has, through proxy and shim, and the deletion of a forgotten volume."""

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from crust.blockdriver.controller import capacity
from crust.cli import main
from tests.integration.chain.conftest import Chain
from tests.support.co import MIB, capability

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]


async def crust(chain: Chain, *words: str, said: str = "") -> Result:
    command, *rest = words
    arguments = [command, "--run-dir", chain.places.run, *rest]
    return await asyncio.to_thread(CliRunner().invoke, main.main, arguments, said)


async def shown(chain: Chain) -> Any:
    return json.loads((await crust(chain, "pool", "-o", "json")).output)


async def test_pool_shows_space_and_who_has_each_volume(chain: Chain) -> None:
    deferred = await chain.volume()
    target = chain.places.target("pod-1")
    await chain.publish(deferred, target)
    on_host = (await chain.co.create("other", capability(), size=32 * MIB)).volume_id
    await chain.stage(on_host, "second")
    host_target = chain.places.target("pod-2")
    published = chain.co.publish(
        on_host, host_target, capability(), defer=False, staging=chain.staging("second")
    )
    await chain.note_publish(on_host, host_target, published)
    unused = (await chain.co.create("idle", capability(), size=32 * MIB)).volume_id
    with chain.sandbox(target):
        found = await shown(chain)
    states = {each["volume_id"]: each["state"] for each in found["volumes"]}
    assert states == {deferred: "claimed", on_host: "on-host", unused: "unused"}
    assert {each["pv"] for each in found["volumes"]} == {"pvc", "other", "idle"}
    (pool,) = found["pools"]
    assert pool["space"]["reserved_bytes"] == sum(each["size_bytes"] for each in found["volumes"])
    assert 0 < pool["space"]["free_bytes"] < pool["space"]["size_bytes"]
    table = (await crust(chain, "pool")).output
    assert "idle" in table
    assert unused not in table, "ids are wide"


async def test_forgotten_volume_is_deleted_once_the_operator_agrees(chain: Chain) -> None:
    used, idle = [
        (await chain.co.create(name, capability(), size=32 * MIB)).volume_id
        for name in ("used", "idle")
    ]
    await chain.stage(used)
    target = chain.places.target("pod-1")
    await chain.publish(used, target)
    refused = await crust(chain, "pool", "delete", "used", "--yes")
    assert (refused.exit_code, "[VolumeNotUnused]" in refused.output) == (1, True)
    assert (await crust(chain, "pool", "delete", "idle", said="n\n")).exit_code == 1
    assert {each["pv"] for each in (await shown(chain))["volumes"]} == {"used", "idle"}
    deleted = await crust(chain, "pool", "delete", "idle", said="y\n")
    assert (deleted.exit_code, f"deleted {idle}" in deleted.output) == (0, True)
    assert [each["pv"] for each in (await shown(chain))["volumes"]] == ["used"]
    absent = await crust(chain, "pool", "delete", "idle", "--yes")
    assert "[VolumeNotInPool]" in absent.output


async def test_pool_that_is_low_is_a_warning_everywhere(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = capacity.PoolCapacity.measured
    monkeypatch.setattr(
        capacity.PoolCapacity, "measured", lambda pool: {**measured(pool), "free": 0}
    )
    status = await crust(chain, "status")
    assert (status.exit_code, "nothing of" in status.output) == (0, True), "volumes still work"
    assert "nothing of" in (await crust(chain, "doctor", "--check", "drivers")).output
    pool = await crust(chain, "pool")
    assert (pool.exit_code, "low" in pool.output) == (1, True)
