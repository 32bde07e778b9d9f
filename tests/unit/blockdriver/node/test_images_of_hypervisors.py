"""A volume that only a hypervisor opens, from stage to delete: a guest gets the image, and the host gets nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.node.live_volumes import NotStaged
from crust.core import volumes
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB
from tests.support.drivers.block_driver import Bench, block
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised

SECRETS = {"userID": "client.node", "userKey": "AQ=="}


@dataclass
class Volume:
    """One volume of a driver whose engine makes no devices."""

    bench: Bench
    id: str
    target: str

    async def stage(self, secrets: Mapping[str, str] = SECRETS) -> None:
        await self.bench.stage(self.id, secrets=dict(secrets))

    async def publish(self, *, deferred: bool = True, **fields: Any) -> csi_pb2.DeferredMount:
        publishing = self.bench.publish(self.id, self.target, deferred=deferred, **fields)
        return (await publishing).deferred_mount

    async def end(self) -> None:
        await self.bench.unpublish(self.id, self.target)
        await self.bench.unstage(self.id)
        await self.bench.delete(self.id)


@pytest.fixture
async def volume(tmp_path: Path) -> Volume:
    bench = Bench(tmp_path, backend=MemoryBackend(has_devices=False))
    made = await bench.create(size=0)
    return Volume(bench, made.volume_id, bench.target("pod"))


async def test_guest_gets_the_image_and_formats_it_with_its_key(volume: Volume) -> None:
    await volume.stage()
    answer = csi.deferred_mount(await volume.publish())
    assert answer.image is not None
    assert (answer.image.image, answer.image.user) == (volume.id, "node")
    assert answer.secrets == {"userKey": "AQ=="}
    assert answer.format == volumes.GuestFormat()
    assert answer.capacity_bytes > 0


async def test_secret_of_the_publish_is_newer_than_the_stages(volume: Volume) -> None:
    await volume.stage()
    answer = await volume.publish(secrets={"userID": "other", "userKey": "Ag=="})
    assert (answer.network_image.user, answer.secrets["userKey"]) == ("other", "Ag==")


async def test_publish_without_the_key_of_a_user_is_refused_with_the_remedy(volume: Volume) -> None:
    await volume.stage({})
    with raised("CephKeyMissing", match="node-publish-secret-name"):
        await volume.publish()


async def test_host_mount_is_refused_and_leaves_nothing(volume: Volume) -> None:
    await volume.stage()
    with pytest.raises(protocol.NoHostDevice):
        await volume.publish(deferred=False)
    assert not Path(volume.target).exists()
    await volume.end()


async def test_raw_volume_is_refused_at_the_stage_and_leaves_nothing(volume: Volume) -> None:
    with pytest.raises(protocol.NoHostDevice):
        await volume.bench.stage(volume.id, block(), secrets=SECRETS)
    access = volume.bench.driver.stores.access
    assert access.attached(volumes.VolumeId(volume.id)) is None
    await volume.end()


async def test_life_of_a_volume_that_a_guest_had_ends_without_a_device(volume: Volume) -> None:
    await volume.stage()
    await volume.publish()
    with pytest.raises(protocol.StillAttached):
        await volume.bench.delete(volume.id)
    await volume.bench.take_down()
    with pytest.raises(NotStaged):
        await volume.publish()
    await volume.bench.delete(volume.id)


async def test_growth_at_the_node_answers_the_size_of_the_image(volume: Volume) -> None:
    await volume.stage()
    await volume.publish()
    await volume.bench.grow(volume.id, 4096 * MIB)
    grown = await volume.bench.expand(volume.id, volume.target, 4096 * MIB, deferred=True)
    assert grown == 4096 * MIB
