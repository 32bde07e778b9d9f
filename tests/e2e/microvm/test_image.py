"""The guest image is a function of its inputs, and a build may be killed at any moment."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.kata.guest import image

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]


def _with_packages(cache: Path, built: image.GuestImage) -> Path:
    """A cache with the fetched packages and without images."""
    (cache / "packages").mkdir(parents=True)
    for package in (built.directory.parent / "packages").iterdir():
        os.link(package, cache / "packages" / package.name)
    return cache


@pytest.fixture
def cache(guest_image: image.GuestImage) -> Path:
    """A cache on the same filesystem, because its packages are linked and not copied."""
    return _with_packages(guest_image.directory.parent / f"test-{os.getpid()}", guest_image)


@pytest.fixture(autouse=True)
def _no_cache_left(guest_image: image.GuestImage) -> "object":
    yield
    subprocess.run(["rm", "-rf", guest_image.directory.parent / f"test-{os.getpid()}"], check=True)


async def test_a_second_build_does_nothing(guest_image: image.GuestImage) -> None:
    before = guest_image.initramfs.stat()
    again = await asyncio.to_thread(image.build, guest_image.directory.parent)
    assert again == guest_image
    after = again.initramfs.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


_DYING_BUILDER = """
import os, sys
from pathlib import Path
from examples.kata.guest import archive, image, kernel, packages

setattr(globals()[sys.argv[2]], sys.argv[3], lambda *_: os.kill(os.getpid(), 9))
image.build(Path(sys.argv[1]))
"""


def test_killed_builds_leave_no_image(guest_image: image.GuestImage, cache: Path) -> None:
    steps = [("packages", "unpack"), ("kernel", "extract_vmlinux"), ("archive", "pack")]
    for module, function in steps:
        argv = [sys.executable, "-c", _DYING_BUILDER, str(cache), module, function]
        assert subprocess.run(argv, check=False).returncode == -9
        assert list(cache.glob("image-*")) == []
    again = image.build(cache)
    assert again.digest == guest_image.digest
    assert again.directory != guest_image.directory
    for name in ("initramfs", "vmlinux", "manifest.json"):
        assert (again.directory / name).read_bytes() == (guest_image.directory / name).read_bytes()
    assert {"ext4", "xfs"} <= set(again.filesystems)
    assert list(cache.glob(".building-*")) == []
