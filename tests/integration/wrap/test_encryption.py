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


async def test_passphrase_of_the_stage_is_for_the_guest_alone(cloud: Wrapped) -> None:
    volume, target = await cloud.volume(context=LUKS, mkfs=False), cloud.target("one")
    await cloud.stage(volume, OF_STAGE)
    await cloud.publish(volume, target)
    mount = cloud.record(target).mount
    assert (mount.encryption, mount.format) == (volumes.Encryption.LUKS, volumes.GuestFormat())
    asked = [*cloud.driver.calls("NodeStageVolume"), *cloud.driver.calls("NodePublishVolume")]
    assert asked
    assert all("passphrase" not in each.secrets for each in asked)
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
    await cloud.restart_shim()
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
