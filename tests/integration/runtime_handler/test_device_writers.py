"""`crust device-writers`: the SDK's question about a reader's device, for a runtime in any language."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crust.cli import main
from crust.host.block import loop
from tests.integration.host.conftest import MIB, run
from tests.support.waiting_processes import waiting

pytestmark = pytest.mark.root
_OPENED = "device = open(sys.argv[1], sys.argv[2], buffering=0)"


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 16 * MIB)
    run("mkfs.ext4", "-q", str(image))
    attached = loop.attach(str(image))
    try:
        yield attached.path
    finally:
        loop.detach(attached)


def _asked(*words: str) -> Result:
    return CliRunner().invoke(main.main, ("device-writers", *words))


def test_device_that_is_only_read_has_no_writer(device: str) -> None:
    with waiting(_OPENED, device, "rb"):
        result = _asked(device)
    assert (result.exit_code, result.output) == (0, f"{device} has no writer\n")


def test_process_that_can_write_is_named_unless_it_may(device: str) -> None:
    with waiting(_OPENED, device, "r+b") as pid:
        refused, excepted = _asked(device), _asked(device, "--but", str(pid))
    assert (refused.exit_code, excepted.exit_code) == (1, 0)
    assert "[DeviceInUse]" in refused.output
    assert str(pid) in refused.output


def test_mounted_filesystem_that_can_write_is_named(device: str, tmp_path: Path) -> None:
    target = tmp_path / "mounted"
    target.mkdir()
    run("mount", device, str(target))
    try:
        result = _asked(device)
    finally:
        run("umount", str(target))
    assert result.exit_code == 1
    assert f"[DeviceMountedOnHost] the device {device}" in result.output
    assert str(target) in result.output


def test_path_of_no_device_is_wrong_usage(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert _asked(str(file)).exit_code == 2
