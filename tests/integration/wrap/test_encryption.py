"""An encrypted volume of a driver that knows nothing of it: the passphrase is the guest's, and not the driver's."""

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from tests.integration.wrap.conftest import DEFERRED, SECRETS, Wrapped
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode
PASSPHRASE = "correct horse battery staple"
OF_STAGE = {**SECRETS, "passphrase": PASSPHRASE}
LUKS = {**DEFERRED, "crust.dev/encryption": "luks", "crust.dev/created-empty": "true"}


def _has_passphrase(root: str) -> list[str]:
    files = (path for path in Path(root).rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in files if PASSPHRASE.encode() in path.read_bytes()]


async def test_passphrase_of_the_stage_is_for_the_guest_alone(cloud_node: Wrapped) -> None:
    node = cloud_node
    volume, target = await node.volume(context=LUKS, mkfs=False), node.target("one")
    await node.stage(volume, OF_STAGE)
    await node.publish(volume, target)
    entry = node.entry(target)
    assert entry is not None
    mount = entry.require().mount
    assert (mount.encryption, mount.format) == (volumes.Encryption.LUKS, volumes.GuestFormat())
    asked = [*node.driver.calls("NodeStageVolume"), *node.driver.calls("NodePublishVolume")]
    assert asked
    assert all("passphrase" not in each.secrets for each in asked)
    assert asked[0].secrets["token"] == SECRETS["token"]
    assert await asyncio.to_thread(_has_passphrase, node.places.root) == []
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_without_a_passphrase_nothing_is_published(cloud_node: Wrapped) -> None:
    node = cloud_node
    volume, target = await node.volume(context=LUKS, mkfs=False), node.target("one")
    await node.stage(volume)
    publish = node.publish(volume, target)
    await refused(publish, Code.FAILED_PRECONDITION, "PassphraseMissing", "delete the pod")
    node.check_unpublished(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_after_a_restart_the_publish_must_bring_it(cloud_node: Wrapped) -> None:
    node = cloud_node
    volume, target = await node.volume(context=LUKS, mkfs=False), node.target("one")
    await node.stage(volume, OF_STAGE)
    await node.restart_shim()
    await refused(node.publish(volume, target), Code.FAILED_PRECONDITION, "PassphraseMissing")
    await node.publish(volume, target, secrets={**SECRETS, "passphrase": "of the publish"})
    assert node.entry(target) is not None
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_volume_that_nothing_defers_is_staged_as_block_and_not_mounted_here(
    cloud_node: Wrapped,
) -> None:
    node = cloud_node
    context = {"crust.dev/encryption": "luks"}
    volume, target = await node.volume(context=context, mkfs=False), node.target("one")
    await node.stage(volume, OF_STAGE)
    assert not os.path.ismount(node.staging(volume))
    publish = node.publish(volume, target)
    await refused(publish, Code.FAILED_PRECONDITION, "EncryptedOnHost")
    node.check_unpublished(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)
