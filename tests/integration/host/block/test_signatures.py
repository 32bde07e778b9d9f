"""What is found on a device, and how it is cleared."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import devices, holders, loop, signatures
from crust.host.filesystems import mkfs, supported
from tests.integration.host.conftest import MIB, Attach, read, run, write
from tests.support.faults.syncs import recorded

pytestmark = pytest.mark.root


Probe = Callable[[str], signatures.Signature]


@pytest.fixture(params=[signatures.probe, signatures.probe_untrusted], ids=["trusted", "untrusted"])
def probe(request: pytest.FixtureRequest) -> Probe:
    """Both ways of probing, which must answer the same."""
    return request.param  # type: ignore[no-any-return]


def test_probe_of_luks_volume_is_other(attach: Attach, probe: Probe) -> None:
    device = attach()
    write(device.path, 0, b"LUKS\xba\xbe\x00\x01" + bytes(600))
    assert probe(device.path) == signatures.Other("crypto crypto_LUKS")


def test_probe_of_swap_is_other(attach: Attach, probe: Probe) -> None:
    device = attach()
    run("mkswap", device.path)
    assert probe(device.path) == signatures.Other("other swap")


def test_probe_of_two_signatures_is_ambiguous(attach: Attach, probe: Probe) -> None:
    device, other = attach(300 * MIB), attach(300 * MIB, "other.img")
    run("mkfs.xfs", "-q", device.path)
    run("mkfs.ext4", "-q", other.path)
    write(device.path, 1024, read(other.path, 1024, 1024))
    with pytest.raises(signatures.AmbiguousSignature):
        probe(device.path)


async def test_mkfs_on_two_signatures_is_refused(attach: Attach) -> None:
    device, other = attach(300 * MIB), attach(300 * MIB, "other.img")
    run("mkfs.xfs", "-q", device.path)
    run("mkfs.ext4", "-q", other.path)
    write(device.path, 1024, read(other.path, 1024, 1024))
    with pytest.raises(signatures.AmbiguousSignature):
        await mkfs.make(device.path, "ext4")


def test_probe_of_detached_device_is_an_error(attach: Attach, probe: Probe) -> None:
    device = attach()
    loop.detach(device)
    with pytest.raises(errors.RuntimeFailed, match="no size"):
        probe(device.path)
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(device.path)


@pytest.mark.parametrize("fs_type", supported.SUPPORTED)
async def test_probe_of_filesystem_has_type_and_uuid(attach: Attach, fs_type: str) -> None:
    device = attach(512 * MIB)
    probe = signatures.probe_untrusted
    assert await asyncio.to_thread(probe, device.path) == signatures.Blank()
    await mkfs.make(device.path, fs_type)
    found = await asyncio.to_thread(probe, device.path)
    assert isinstance(found, signatures.Filesystem)
    assert (found.type, len(found.uuid)) == (fs_type, 36)
    assert found == signatures.probe(device.path)


def test_zero_device_reads_as_zeros_and_frees_its_space(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8 << 20))
    device = loop.attach(str(image))
    try:
        hold = devices.open_exclusive(device.path)
        with pytest.raises(holders.DeviceInUse):
            devices.zero_device(device.path)
        os.close(hold)
        assert not devices.is_blank(device.path)
        with recorded() as steps:
            devices.zero_device(device.path)
        assert steps == [("sync", device.path)]
        assert Path(device.path).read_bytes().count(0) == 8 << 20
    finally:
        loop.detach(device)
    assert image.read_bytes().count(0) == 8 << 20
    assert image.stat().st_blocks * 512 < 1 << 20
