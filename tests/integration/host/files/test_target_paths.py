"""Targets that are mount points, or have a bound device, are kept."""

from pathlib import Path

import pytest

from crust.core.volumes import TargetPath
from crust.host.block import loop
from crust.host.files import target_paths
from crust.host.mounts import mount_api
from tests.integration.host.conftest import Attach
from tests.support.raised import raised

pytestmark = pytest.mark.root


def test_remove_of_a_mount_point_is_refused(mountpoint: str, tmp_path: Path) -> None:
    """Device numbers are equal for a bind within one filesystem: a removal by them would delete the volume's data."""
    target, roots = TargetPath.parse(mountpoint), [str(tmp_path)]
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for is_bind in (False, True):
        if is_bind:
            mount_api.bind(str(tmp_path / "source"), mountpoint)
        else:
            mount_api.mount_guard(mountpoint)
        target_paths.make_directory(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(TargetPath.parse(f"{tmp_path}/link/target"), [f"{tmp_path}/link"])
        mount_api.unmount(mountpoint)
    target_paths.remove(target, roots)
    assert not Path(mountpoint).exists()
    Path(mountpoint).mkdir()


def test_make_file_keeps_a_bound_device_alone(attach: Attach, tmp_path: Path) -> None:
    device: loop.LoopDevice = attach()
    target, roots = TargetPath.parse(str(tmp_path / "block")), [str(tmp_path)]
    target_paths.make_file(target, roots)
    mount_api.bind(device.path, target.text)
    try:
        target_paths.make_file(target, roots)
        with raised("TargetStillMounted"):
            target_paths.remove(target, roots)
    finally:
        mount_api.unmount(target.text)
    target_paths.remove(target, roots)
    assert not (tmp_path / "block").exists()
