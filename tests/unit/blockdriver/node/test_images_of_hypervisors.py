"""A volume that only a hypervisor opens, from stage to delete: a guest gets the image, and the host gets nothing."""

from pathlib import Path

import pytest

from crust.blockdriver import app
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.blockdriver.node.live_volumes import NotStaged
from crust.core import volumes
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import create_request, publish_request, stage_request
from tests.support.drivers import memory_backend
from tests.support.drivers.block_driver import MIB, caller, mount
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised

SECRETS = {"userID": "client.node", "userKey": "AQ=="}


class Volume:
    """One volume of a driver whose engine makes no devices, and its paths."""

    def __init__(self, driver: Driver, root: Path, volume_id: str) -> None:
        self.driver = driver
        self.volume_id = volume_id
        self.staging = root / "staging"
        self.staging.mkdir()
        self.target = root / "target"

    async def stage(self, *, raw: bool = False, secrets: dict[str, str] | None = None) -> None:
        await self.driver.node.NodeStageVolume(
            stage_request(
                self.volume_id,
                str(self.staging),
                self.capability(raw=raw),
                secrets=SECRETS if secrets is None else secrets,
            ),
            caller(),
        )

    async def publish(
        self, *, deferred: bool = True, secrets: dict[str, str] | None = None
    ) -> csi_pb2.DeferredMount:
        answer = await self.driver.node.NodePublishVolume(
            publish_request(
                self.volume_id,
                str(self.target),
                self.capability(),
                defer=deferred,
                staging=str(self.staging),
                secrets=secrets or {},
            ),
            caller(),
        )
        return answer.deferred_mount

    async def unpublish(self) -> None:
        await self.driver.node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(
                volume_id=self.volume_id, target_path=str(self.target)
            ),
            caller(),
        )

    async def unstage(self) -> None:
        await self.driver.node.NodeUnstageVolume(
            csi_pb2.NodeUnstageVolumeRequest(
                volume_id=self.volume_id, staging_target_path=str(self.staging)
            ),
            caller(),
        )

    async def delete(self) -> None:
        await self.driver.controller.DeleteVolume(
            csi_pb2.DeleteVolumeRequest(volume_id=self.volume_id), caller()
        )

    @staticmethod
    def capability(*, raw: bool = False) -> csi_pb2.VolumeCapability:
        pb = csi.capability_to_wire(mount())
        if raw:
            pb.block.SetInParent()
        return pb


@pytest.fixture
async def volume(tmp_path: Path) -> Volume:
    state = tmp_path / "state"
    state.mkdir()
    driver = app.build(
        state_dir=str(state),
        run_dir=str(tmp_path / "run"),
        node_id="node-1",
        target_roots=(str(tmp_path),),
        engine=memory_backend.engine(str(state), MemoryBackend(has_devices=False)),
    )
    driver.open()
    made = await driver.controller.CreateVolume(create_request(size=0), caller())
    return Volume(driver, tmp_path, made.volume.volume_id)


async def test_guest_gets_the_image_and_formats_it_with_its_key(volume: Volume) -> None:
    await volume.stage()
    answer = csi.deferred_mount(await volume.publish())
    assert answer.image is not None
    assert (answer.image.image, answer.image.user) == (volume.volume_id, "node")
    assert answer.secrets == {"userKey": "AQ=="}
    assert answer.format == volumes.GuestFormat()
    assert answer.capacity_bytes > 0


async def test_secret_of_the_publish_is_newer_than_the_stages(volume: Volume) -> None:
    await volume.stage()
    answer = await volume.publish(secrets={"userID": "other", "userKey": "Ag=="})
    assert (answer.network_image.user, answer.secrets["userKey"]) == ("other", "Ag==")


async def test_publish_without_the_key_of_a_user_is_refused_with_the_remedy(volume: Volume) -> None:
    await volume.stage(secrets={})
    with raised("CephKeyMissing", match="node-publish-secret-name"):
        await volume.publish()


async def test_host_mount_is_refused_and_leaves_nothing(volume: Volume) -> None:
    await volume.stage()
    with pytest.raises(protocol.NoHostDevice):
        await volume.publish(deferred=False)
    assert not volume.target.exists()
    await volume.unpublish()
    await volume.unstage()
    await volume.delete()


async def test_raw_volume_is_refused_at_the_stage_and_leaves_nothing(volume: Volume) -> None:
    with pytest.raises(protocol.NoHostDevice):
        await volume.stage(raw=True)
    assert volume.driver.stores.access.attached(volumes.VolumeId(volume.volume_id)) is None
    await volume.unstage()
    await volume.delete()


async def test_life_of_a_volume_that_a_guest_had_ends_without_a_device(volume: Volume) -> None:
    await volume.stage()
    await volume.publish()
    with pytest.raises(protocol.StillAttached):
        await volume.delete()
    await volume.unpublish()
    await volume.unstage()
    with pytest.raises(NotStaged):
        await volume.publish()
    await volume.delete()


async def test_growth_at_the_node_answers_the_size_of_the_image(volume: Volume) -> None:
    await volume.stage()
    await volume.publish()
    size = csi_pb2.CapacityRange(required_bytes=4096 * MIB)
    await volume.driver.controller.ControllerExpandVolume(
        csi_pb2.ControllerExpandVolumeRequest(volume_id=volume.volume_id, capacity_range=size),
        caller(),
    )
    answer = await volume.driver.node.NodeExpandVolume(
        csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume.volume_id,
            volume_path=str(volume.target),
            capacity_range=size,
            defer_fs_ops=True,
        ),
        caller(),
    )
    assert answer.capacity_bytes == 4096 * MIB
