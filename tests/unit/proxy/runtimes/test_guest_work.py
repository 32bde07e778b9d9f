"""Volumes that the guest must format or decrypt go only to a handler that offers it."""

from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.core.volumes import HandlerFeature
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode
PASSPHRASE = "correct horse battery staple"


@pytest.mark.spec("D-38")
async def test_volume_created_empty_is_refused_if_the_handler_cannot_format(node: Node) -> None:
    target = node.places.target("one")
    node.driver.format = volumes.GuestFormat(ext4_reserved_percent=1)
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.FORMAT}):
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "cannot make", "FORMAT"
        )
        node.check_untouched(target)


@pytest.mark.spec("D-38")
async def test_volume_created_empty_is_recorded_with_its_mkfs_options(kata: Node) -> None:
    target = kata.places.target("one")
    kata.driver.format = volumes.GuestFormat(ext4_reserved_percent=1)
    await kata.co.publish("vol-1", target)
    assert kata.record(target).mount.format == volumes.GuestFormat(None, 1)


@pytest.mark.spec("D-39")
async def test_encrypted_volume_is_refused_if_the_handler_cannot_decrypt(node: Node) -> None:
    target = node.places.target("one")
    node.driver.passphrase = PASSPHRASE
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.LUKS}):
        await refused(
            node.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "cannot open LUKS", "LUKS"
        )
        node.check_untouched(target)


@pytest.mark.spec("D-39")
async def test_passphrase_reaches_no_file_of_the_entry(kata: Node) -> None:
    target = kata.places.target("one")
    kata.driver.passphrase = PASSPHRASE
    await kata.co.publish("vol-1", target)
    assert kata.record(target).mount.encryption is volumes.Encryption.LUKS
    files = [path for path in Path(kata.places.volumes).rglob("*") if path.is_file()]
    assert files
    assert not any(PASSPHRASE.encode() in path.read_bytes() for path in files)
