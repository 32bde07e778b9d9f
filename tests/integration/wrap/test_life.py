"""The life of a deferred volume of a driver that knows nothing of deferral, beside an ordinary one."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from crust.core import deferral_keys, volumes
from crust.host.block import devices, signatures
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from tests.integration.wrap.conftest import DEFERRED, SECRETS, Wrapped, node_with
from tests.support.co import MIB
from tests.support.faults.refusals import refused
from tests.support.probes import probed

pytestmark = pytest.mark.root


@pytest.fixture(
    params=["cloud", "minimal", "stateful", "cloud in crust node", "minimal in crust node"]
)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Wrapped]:
    """Each of the drivers, wrapped by two processes and by one."""
    kind, _, one = request.param.partition(" in ")
    async with node_with(kind, is_one_process=bool(one)) as running_node:
        yield running_node


async def test_deferred_volume_from_stage_to_unstage(node: Wrapped) -> None:
    volume, target = await node.published_volume()
    record = node.record(target)
    assert [record.device] == node.driver.attached()
    assert record.mount.fs_type == "ext4"
    assert record.mount.capacity_bytes == 64 * MIB
    with node.sandbox(target) as device:
        assert device == record.device
    await node.unpublish(volume, target)
    node.check_unpublished(volume, target)


@pytest.mark.spec("D-41")
async def test_driver_sees_a_raw_volume_and_no_key_of_crust(node: Wrapped) -> None:
    volume, target = await node.staged_volume(context={**DEFERRED, "vendor": "1"})
    await node.publish(volume, target, readonly=True)
    paths = node.paths(volume)
    (published,) = node.driver.calls("NodePublishVolume")
    asked = node.publish_request(volume, target, readonly=True)
    asked.target_path = paths.leaf(target)
    asked.staging_target_path = paths.staging if node.stages else ""
    asked.volume_capability.block.SetInParent()
    asked.readonly = False
    for key in DEFERRED:
        del asked.volume_context[key]
    assert published == asked
    assert asked.volume_context["vendor"] == "1"
    for staged in node.driver.calls("NodeStageVolume"):
        wanted = node.stage_request(volume)
        wanted.staging_target_path = paths.staging
        wanted.volume_capability.block.SetInParent()
        for key in DEFERRED:
            del wanted.volume_context[key]
        assert staged == wanted
    assert node.record(target).readonly


async def test_ordinary_volume_passes_byte_for_byte_beside_a_deferred_one(node: Wrapped) -> None:
    deferred, ordinary = await node.volume("deferred"), await node.volume("ordinary", context={})
    one, two = node.target("one"), node.target("two")
    await node.stage(deferred)
    await node.publish(deferred, one)
    seen = len(node.driver.raw())
    sent: list[tuple[str, bytes]] = []
    if node.stages:
        await node.stage(ordinary)
        sent.append(("NodeStageVolume", _bytes(node.stage_request(ordinary))))
    await node.publish(ordinary, two)
    sent.append(("NodePublishVolume", _bytes(node.publish_request(ordinary, two))))
    assert mountinfo.stacked_at(two)
    Path(two, "file").write_text("data", encoding="utf-8")
    await node.unpublish(ordinary, two)
    await node.unstage(ordinary)
    received = node.driver.raw()[seen:]
    assert [(name, data) for name, data in received if not name.startswith("NodeUn")] == sent
    assert [name for name, _ in received[len(sent) :]] == (
        ["NodeUnpublishVolume", "NodeUnstageVolume"] if node.stages else ["NodeUnpublishVolume"]
    )


async def test_deferred_publish_without_staging_path_is_refused(cloud: Wrapped) -> None:
    """The driver would not refuse it: the shim has a path of its own for it."""
    volume, target = await cloud.staged_volume()
    asked = cloud.publish_request(volume, target)
    asked.staging_target_path = ""
    await refused(
        cloud.node.NodePublishVolume(asked, timeout=60),
        grpc.StatusCode.FAILED_PRECONDITION,
        "StagingPathNotGiven",
    )
    assert cloud.entry(target) is None


async def test_same_publish_again_asks_the_driver_once(node: Wrapped) -> None:
    volume, target = await node.staged_volume()
    for _ in range(3):
        await node.publish(volume, target)
    assert len(node.driver.calls("NodePublishVolume")) == 1


async def test_blank_volume_that_was_created_empty_is_left_to_guest(node: Wrapped) -> None:
    context = {**DEFERRED, deferral_keys.CREATED_EMPTY: "true"}
    _volume, target = await node.published_volume(context=context, mkfs=False)
    record = node.record(target)
    assert record.mount.format == volumes.GuestFormat()
    assert devices.is_blank(record.device)


@pytest.mark.spec("D-38")
async def test_blank_volume_is_formatted_once_for_handler_that_formats_none(
    node: Wrapped,
) -> None:
    context = {
        **DEFERRED,
        deferral_keys.RUNTIME_HANDLER: "plain",
        deferral_keys.CREATED_EMPTY: "true",
    }
    endpoint = f"{node.places.root}/plain.sock"
    features = frozenset({volumes.HandlerFeature.READ_ONLY})
    async with node.handler(endpoint=endpoint, name="plain", features=features):
        volume, target = await node.published_volume(context=context, mkfs=False)
        made = probed(node.record(target).device)
        assert isinstance(made, signatures.Filesystem)
        assert node.record(target).mount.format is None
        await node.unpublish(volume, target)
        await node.publish(volume, target)
        assert probed(node.record(target).device) == made
        await node.unpublish(volume, target)
    node.check_unpublished(volume, target)


async def test_unpublish_waits_for_a_writer_of_the_device(cloud: Wrapped) -> None:
    """A hypervisor whose runtime has died. The driver would detach the device from it."""
    volume, target = await cloud.published_volume()
    with open(cloud.record(target).device, "r+b", buffering=0):
        await refused(
            cloud.unpublish(volume, target),
            grpc.StatusCode.FAILED_PRECONDITION,
            "DeviceInUse",
            f"[{os.getpid()}] by fd",
        )
        assert cloud.driver.calls("NodeUnpublishVolume") == []


async def test_device_is_the_drivers_own_and_not_devtmpfs(node: Wrapped) -> None:
    volume, target = await node.published_volume()
    leaf = node.paths(volume).leaf(target)
    record = node.record(target)
    assert devices.identify(leaf) == record.mount.source.identity
    assert os.stat(leaf).st_rdev == os.stat(record.device).st_rdev


def _bytes(request: object) -> bytes:
    data: bytes = request.SerializeToString()  # type: ignore[attr-defined]
    return data


Code = grpc.StatusCode


async def test_driver_grows_the_device_as_block(cloud: Wrapped) -> None:
    volume, target = await cloud.published_volume()
    assert await cloud.expand(volume, target, 96 * MIB) == 96 * MIB
    (asked,) = cloud.driver.calls("NodeExpandVolume")
    paths = cloud.paths(volume)
    assert (asked.volume_path, asked.staging_target_path) == (paths.leaf(target), paths.staging)
    assert asked.volume_capability.HasField("block")
    assert not asked.defer_fs_ops
    record = cloud.record(target)
    assert devices.size_bytes(record.device) == record.mount.capacity_bytes == 96 * MIB


async def test_staged_volume_is_published_while_it_grows(cloud: Wrapped) -> None:
    """A kubelet expands between stage and publish."""
    volume, target = await cloud.staged_volume()
    assert await cloud.expand(volume, cloud.staging(volume), 96 * MIB) == 96 * MIB
    assert cloud.driver.names()[-3:] == [
        "NodePublishVolume", "NodeExpandVolume", "NodeUnpublishVolume",
    ]  # fmt: skip
    cloud.check_unpublished(volume, target)
    await cloud.publish(volume, target)
    assert cloud.record(target).mount.capacity_bytes == 96 * MIB


async def test_expansion_without_a_path_is_refused(cloud: Wrapped) -> None:
    volume = await cloud.volume()
    await cloud.stage(volume)
    request = csi_pb2.NodeExpandVolumeRequest(volume_id=volume.volume_id)
    calls = cloud.driver.names()
    await refused(
        cloud.node.NodeExpandVolume(request, timeout=60),
        grpc.StatusCode.INVALID_ARGUMENT,
        "volume_path",
    )
    assert cloud.driver.names() == calls


async def test_failed_expansion_leaves_a_staged_volume_unpublished(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume()
    cloud.driver.misbehave(NodeExpandVolume="fail INTERNAL no rescan")
    await refused(cloud.expand(volume, cloud.staging(volume), 96 * MIB), Code.INTERNAL, "no rescan")
    cloud.check_unpublished(volume, target)


async def test_secrets_of_a_stage_are_in_no_file(cloud: Wrapped) -> None:
    volume, _ = await cloud.published_volume()
    files = [
        path
        for place in (cloud.places.kubelet, cloud.places.run)
        for path in Path(place).rglob("*")
        if path.is_file() and b"correct-token" in path.read_bytes()
    ]
    assert files == []
    assert os.stat(cloud.paths(volume).staging).st_mode & 0o7777 == 0o1750


PASSPHRASE = "correct horse battery staple"
OF_STAGE = {**SECRETS, "passphrase": PASSPHRASE}
LUKS = {**DEFERRED, "crust.dev/encryption": "luks", "crust.dev/created-empty": "true"}


def _has_passphrase(root: str) -> list[str]:
    files = (path for path in Path(root).rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in files if PASSPHRASE.encode() in path.read_bytes()]


async def test_passphrase_of_the_stage_is_for_the_guest_alone(cloud: Wrapped) -> None:
    volume, target = await cloud.volume(context=LUKS, mkfs=False), cloud.target("one")
    await cloud.stage(volume, OF_STAGE)
    await cloud.publish(volume, target)
    mount = cloud.record(target).mount
    assert (mount.encryption, mount.format) == (volumes.Encryption.LUKS, volumes.GuestFormat())
    asked = [*cloud.driver.calls("NodeStageVolume"), *cloud.driver.calls("NodePublishVolume")]
    assert asked
    assert all("passphrase" not in request.secrets for request in asked)
    assert asked[0].secrets["token"] == SECRETS["token"]
    assert await asyncio.to_thread(_has_passphrase, cloud.places.root) == []


async def test_without_a_passphrase_nothing_is_published(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume(context=LUKS, mkfs=False)
    publish = cloud.publish(volume, target)
    await refused(publish, Code.FAILED_PRECONDITION, "PassphraseMissing", "delete the pod")
    cloud.check_unpublished(volume, target)


async def test_after_a_restart_the_publish_must_bring_it(cloud: Wrapped) -> None:
    volume, target = await cloud.volume(context=LUKS, mkfs=False), cloud.target("one")
    await cloud.stage(volume, OF_STAGE)
    await cloud.restart("shim")
    await refused(cloud.publish(volume, target), Code.FAILED_PRECONDITION, "PassphraseMissing")
    await cloud.publish(volume, target, secrets={**SECRETS, "passphrase": "of the publish"})
    assert cloud.entry(target) is not None


async def test_undeferred_encrypted_volume_is_staged_as_block_only(cloud: Wrapped) -> None:
    context = {"crust.dev/encryption": "luks"}
    volume, target = await cloud.volume(context=context, mkfs=False), cloud.target("one")
    await cloud.stage(volume, OF_STAGE)
    assert not os.path.ismount(cloud.staging(volume))
    publish = cloud.publish(volume, target)
    await refused(publish, Code.FAILED_PRECONDITION, "EncryptedOnHost")
    cloud.check_unpublished(volume, target)
