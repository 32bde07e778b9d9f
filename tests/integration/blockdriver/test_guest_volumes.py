"""Volumes whose filesystem only guests make and read: `crust.dev/format-in: guest`, `crust.dev/encryption: luks`."""

from pathlib import Path

import pytest

from crust.core import deferral_keys
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import Bench, block
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = pytest.mark.root
GUEST = {"crust.dev/format-in": "guest", "crust.dev/ext4-reserved-percent": "3"}
LUKS = {"crust.dev/encryption": "luks"}
SECRET = {"passphrase": "correct horse battery staple"}


def image(bench: Bench, volume: csi_pb2.Volume) -> Path:
    return pool_layout.image(bench.root / "state", volume.volume_id)


async def test_volume_context_says_who_formats_and_what_is_encrypted(bench: Bench) -> None:
    volume = await bench.create(parameters={**GUEST, **LUKS})
    kept = {key: GUEST.get(key) or LUKS[key] for key in ("crust.dev/format-in", *LUKS)}
    assert dict(volume.volume_context) == kept


@pytest.mark.parametrize(
    "parameters",
    [
        {"crust.dev/format-in": "host"},
        {"crust.dev/encryption": "aes"},
        {**LUKS, "crust.dev/defer": "never"},
    ],
)
async def test_parameters_that_contradict_themselves_are_refused(
    bench: Bench, parameters: dict[str, str]
) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey):
        await bench.create(parameters=parameters)


async def test_host_neither_makes_nor_reads_the_filesystem(bench: Bench) -> None:
    volume = await bench.create(parameters=GUEST)
    await bench.stage(volume.volume_id)
    assert not image(bench, volume).read_bytes().strip(b"\0"), "it was formatted"
    with image(bench, volume).open("r+b") as file:
        file.write(b"what no host can make sense of")
    await bench.unstage(volume.volume_id)
    await bench.stage(volume.volume_id)  # ContentInDoubt for any other volume
    with raised("FilesystemOfGuest"):
        await bench.publish(volume.volume_id, bench.target("pod-a"))


async def test_guest_is_told_to_format_until_a_pod_had_the_raw_device(bench: Bench) -> None:
    volume, target = await bench.create(parameters=GUEST), bench.target("pod-a")
    for _ in range(2):  # the first guest may have gone before it made anything
        await bench.stage(volume.volume_id)
        answer = await bench.publish(volume.volume_id, target, deferred=True)
        assert answer.deferred_mount.HasField("format")
        assert answer.deferred_mount.format.ext4_reserved_percent == 3
        await bench.down(volume.volume_id, target)
    await bench.up(volume.volume_id, target, block())
    await bench.down(volume.volume_id, target)
    await bench.stage(volume.volume_id)
    answer = await bench.publish(volume.volume_id, target, deferred=True)
    assert not answer.deferred_mount.HasField("format")


async def test_encrypted_volume_has_the_passphrase_of_its_stage_or_its_publish(
    bench: Bench,
) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    await bench.stage(volume.volume_id, secrets=SECRET)
    answer = await bench.publish(volume.volume_id, target, deferred=True)
    mount = answer.deferred_mount
    assert (mount.encryption, dict(mount.secrets)) == ("luks", SECRET)
    assert mount.HasField("format")
    newer = {"passphrase": "of the publish"}
    answer = await bench.publish(volume.volume_id, target, deferred=True, secrets=newer)
    assert dict(answer.deferred_mount.secrets) == newer
    await bench.down(volume.volume_id, target)
    files = [path for path in bench.root.rglob("*") if path.is_file()]
    assert not any(SECRET["passphrase"].encode() in path.read_bytes() for path in files)


async def test_encrypted_volume_without_a_passphrase_is_not_published(bench: Bench) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    await bench.stage(volume.volume_id, secrets=SECRET)
    bench.restart()
    with raised("PassphraseMissing", match="delete the pod"):
        await bench.publish(volume.volume_id, target, deferred=True)
    await bench.publish(volume.volume_id, target, deferred=True, secrets=SECRET)


async def test_encrypted_volume_is_published_on_no_host(bench: Bench) -> None:
    volume, target = await bench.create(parameters=LUKS), bench.target("pod-a")
    with raised("EncryptedOnHost"):
        await bench.stage(volume.volume_id, block())
    await bench.stage(volume.volume_id)
    with raised("EncryptedOnHost"):
        await bench.publish(volume.volume_id, target)
    answer = await bench.publish(volume.volume_id, target, deferred=True, secrets=SECRET)
    assert answer.deferred_mount.HasField("format")


async def test_copy_of_a_volume_that_a_guest_had_is_formatted_by_nobody(bench: Bench) -> None:
    volume, target = await bench.create(parameters=GUEST), bench.target("pod-a")
    await bench.up(volume.volume_id, target, deferred=True)
    await bench.down(volume.volume_id, target)
    for name, parameters in (("guest", GUEST), ("host", None)):
        copy = await bench.create(name, parameters=parameters, volume=volume.volume_id)
        if parameters is None:
            with raised("NoFilesystemOnDevice"):
                await bench.stage(copy.volume_id)
            continue
        await bench.stage(copy.volume_id)
        answer = await bench.publish(copy.volume_id, target, deferred=True)
        assert not answer.deferred_mount.HasField("format")
        await bench.down(copy.volume_id, target)
