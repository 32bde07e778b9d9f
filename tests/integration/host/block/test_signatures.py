"""What is on a device, by its signatures."""

import pytest

from crust.core import errors
from crust.host.block import devices, loop, signatures
from tests.integration.host.conftest import MIB, Attach, read, run, write

pytestmark = pytest.mark.root


def test_probe_of_what_is_no_filesystem_is_other(attach: Attach) -> None:
    device = attach()
    run("mkswap", device.path)
    assert signatures.probe(device.path) == signatures.Other("other swap")
    write(device.path, 0, b"LUKS\xba\xbe\x00\x01" + bytes(600))
    write(device.path, 4096 - 10, bytes(10))
    assert signatures.probe(device.path) == signatures.Other("crypto crypto_LUKS")


def test_probe_of_two_signatures_is_ambiguous(attach: Attach) -> None:
    device, other = attach(300 * MIB), attach(300 * MIB, "other.img")
    run("mkfs.xfs", "-q", device.path)
    run("mkfs.ext4", "-q", other.path)
    write(device.path, 1024, read(other.path, 1024, 1024))
    assert signatures.probe(device.path) == signatures.Ambiguous()


def test_probe_of_detached_device_is_an_error(attach: Attach) -> None:
    device = attach()
    loop.detach(device)
    with pytest.raises(errors.RuntimeFailed, match="no size"):
        signatures.probe(device.path)
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(device.path)
