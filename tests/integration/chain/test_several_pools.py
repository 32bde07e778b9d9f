"""Two directories as the pools of one driver: the whole life of a volume in each, and the disk of one goes away."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.engines import pool_access
from crust.cli import main
from crust.host.mounts import mount_api
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB, MODE, capability
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes.node import PARTS
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import ONE_PROCESS, BlockNode, started

pytestmark = pytest.mark.root
Code = grpc.StatusCode
SEVERAL = capability(mode=MODE.SINGLE_NODE_MULTI_WRITER)


@dataclass
class PoolsNode(BlockNode):
    """A node whose driver has the pool `fast` too."""

    @property
    def disk(self) -> str:
        return f"{self.places.root}/fast"

    def take_away(self) -> None:
        """Have an empty directory above the pool's, until it is unmounted."""
        subprocess.run(["mount", "--bind", f"{self.places.root}/none", self.disk], check=True)

    def tables(self) -> dict[str, Any]:
        tables = super().tables()
        memory = f"{self.places.root}/fast.pool-id"
        pools = {"fast": {"state_dir": f"{self.disk}/pool", "pool_id_file": memory}}
        return {**tables, "driver": {**tables["driver"], "pools": pools}}

    async def volume_in(self, pool: str) -> str:
        """A new volume of a class that names the pool, staged at a path of its own."""
        volume_id = (await self.co.create("pvc", SEVERAL, parameters={POOL: pool})).volume_id
        self.created[volume_id] = None
        await self.stage(volume_id, pool)
        return volume_id

    async def command(self, command: str, *rest: str) -> Result:
        arguments = [command, "--run-dir", self.places.run, *rest]
        return await asyncio.to_thread(CliRunner().invoke, main.main, arguments)

    async def probed(self) -> tuple[bool, str]:
        """Probe's answer, and the reason that crust's own commands get beside it."""
        opt_in = ((extensions.KEY, extensions.ERROR_INFO),)
        probe = self.co.identity.Probe(csi_pb2.ProbeRequest(), metadata=opt_in)
        is_ready, trailing = (await probe).ready.value, dict(await probe.trailing_metadata())
        reason = trailing.get(extensions.NOT_READY, b"")
        return is_ready, reason.decode() if isinstance(reason, bytes) else reason


@pytest.fixture(params=[PARTS, ONE_PROCESS], ids=["processes", "node"])
async def node(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[PoolsNode]:
    made = PoolsNode(places, parts=request.param)
    for name in ("none", "fast"):
        os.mkdir(f"{places.root}/{name}")
    async with started(made) as running:
        try:
            yield running
        finally:
            if os.path.ismount(
                made.disk
            ):  # a failed test; what ends devices finds them by their path
                mount_api.unmount_one(made.disk)


@pytest.mark.parametrize("deferred", [True, False])
async def test_volume_of_each_pool_lives_and_ends(node: PoolsNode, *, deferred: bool) -> None:
    ids = {name: await node.volume_in(name) for name in ("default", "fast")}
    assert len({pool_access.pool_of(volume_id) for volume_id in ids.values()}) == 2
    for name, directory in (
        ("default", f"{node.places.root}/state"),
        ("fast", f"{node.disk}/pool"),
    ):
        assert os.listdir(f"{directory}/volumes") == [ids[name]]
        target = node.places.target(name)
        context = {} if not deferred else {"crust.dev/runtime-handler": "kata"}
        publish = node.co.publish(
            ids[name],
            target,
            SEVERAL,
            defer=deferred,
            staging=node.staging(name),
            volume_context=context,
        )
        await node.note_publish(ids[name], target, publish)
        if deferred:
            with node.sandbox(target):
                assert (await node.co.stats(ids[name], target)).usage[0].total > 0
        else:
            assert os.path.ismount(target)
            assert (await node.co.stats(ids[name], target)).usage[0].total > 40 * MIB
        await node.unpublish(ids[name], target)
        await node.unstage(ids[name], name)
        await node.delete_volume(ids[name])
        assert os.listdir(f"{directory}/volumes") == []


async def test_disk_that_goes_away_closes_volumes_of_its_pool_alone(node: PoolsNode) -> None:
    ids = {name: await node.volume_in(name) for name in ("default", "fast")}
    target = node.places.target("default")
    node.take_away()
    async with asyncio.timeout(60):
        while not (await node.probed())[1]:  # noqa: ASYNC110 - a Probe is all that tells
            await asyncio.sleep(0.05)
    is_ready, reason = await node.probed()
    assert is_ready
    assert f"is not in {node.disk}/pool" in reason
    for call in (
        node.co.delete(ids["fast"]),
        node.co.unstage(ids["fast"], node.staging("fast")),
        node.co.volumes(),
    ):
        await refused(call, Code.UNAVAILABLE, "PoolAbsent", node.disk)
    status, shown = await node.command("status"), await node.command("pool", "-o", "json")
    assert status.exit_code == shown.exit_code == 1
    assert status.output.count("PoolAbsent") == 1
    document = json.loads(shown.output)
    spaces = {pool["space"]["name"]: pool["space"] for pool in document["pools"]}
    assert spaces["default"]["problem"] == ""
    assert "PoolAbsent" in spaces["fast"]["problem"]
    assert [(row["volume_id"], row["pool"]) for row in document["volumes"]] == [
        (ids["default"], "default")
    ]
    staging = node.staging("default")
    publish = node.co.publish(ids["default"], target, SEVERAL, defer=False, staging=staging)
    await node.note_publish(ids["default"], target, publish)
    assert (await node.co.stats(ids["default"], target)).usage[0].total > 40 * MIB
    await node.restart()  # the pool is away at the start
    await refused(node.co.delete(ids["fast"]), Code.UNAVAILABLE, "PoolAbsent")
    await node.unpublish(ids["default"], target)
    await node.unstage(ids["default"], "default")
    await node.delete_volume(ids["default"])
    mount_api.unmount_one(node.disk)
    listed = await repeated(node.co.volumes, Code.UNAVAILABLE)
    assert list(listed) == [ids["fast"]]
    assert list(listed[ids["fast"]].status.published_node_ids) == ["node-1"]
