"""Devices by identity, and whether they are blank."""

import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.block import devices

MIB = 1024 * 1024


SIZE = 300 * MIB


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return str(path)


def write(path: str, offset: int, data: bytes = b"\x01") -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="xfs"),
        pytest.param(511, id="dos"),
        pytest.param(512, id="gpt, lvm"),
        pytest.param(1024 + 0x38, id="ext, f2fs"),
        pytest.param(4096, id="md 1.2, bcache"),
        pytest.param(32768 + 1, id="iso"),
        pytest.param(65536 + 64, id="btrfs"),
        pytest.param(4 * MIB, id="luks2 second header"),
        pytest.param(8193 * 1024 + 0x38, id="ext backup, 1 KiB blocks"),
        pytest.param(64 * MIB + 64, id="btrfs mirror"),
        pytest.param(32768 * 4096 + 0x38, id="ext backup, 4 KiB blocks"),
        pytest.param(SIZE - 512, id="gpt backup"),
        pytest.param(SIZE - 65536, id="md 0.90"),
        pytest.param(SIZE - 1, id="last byte"),
    ],
)
def test_is_blank_with_one_byte_in_a_window_is_false(image: str, offset: int) -> None:
    assert devices.is_blank(image)
    write(image, offset)
    assert not devices.is_blank(image)


@pytest.mark.parametrize("size", [1, 512, 4096 + 1, MIB - 1, MIB + 1, 2 * MIB + 7])
def test_is_blank_reads_odd_sizes_to_the_last_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "odd"
    path.write_bytes(bytes(size))
    assert devices.is_blank(str(path))
    write(str(path), size - 1)
    assert not devices.is_blank(str(path))


def test_is_blank_raises_for_device_without_size_or_unreadable(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(errors.NotReady, match="no size"):
        devices.is_blank(str(tmp_path / "empty"))
    with pytest.raises(errors.CrustError):
        devices.is_blank(str(tmp_path))


def test_is_blank_accepts_windows_from_the_end_and_beyond_it(image: str) -> None:
    write(image, SIZE - 10)
    assert devices.is_blank(image, [(0, 100), (SIZE, 100), (10 * SIZE, 1)])
    assert not devices.is_blank(image, [(-10, 1)])


def test_identify_of_a_file_is_refused(image: str) -> None:
    for look in (devices.identify, devices.size_bytes, devices.open_exclusive, devices.is_readonly):
        with pytest.raises(devices.NotABlockDevice):
            look(image)


def test_identify_of_an_absent_device_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound):
        devices.identify(str(tmp_path / "none"))
    with pytest.raises(errors.NotFound):
        devices.is_blank(str(tmp_path / "none"))
