"""Targets that carry mounts."""

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
    target, roots = TargetPath.parse(mountpoint), [str(tmp_path)]
    mount_api.mount_guard(mountpoint)
    target_paths.make_directory(target, roots)
    with raised("TargetStillMounted"):
        target_paths.remove(target, roots)
    mount_api.unmount(mountpoint)
    target_paths.remove(target, roots)
    assert not Path(mountpoint).exists()
    Path(mountpoint).mkdir()


def test_remove_of_a_bind_within_one_filesystem_is_refused(mountpoint: str, tmp_path: Path) -> None:
    """Device numbers are equal for a bind within one filesystem: a removal by them would delete the volume's data."""
    (tmp_path / "source").mkdir()
    mount_api.bind(str(tmp_path / "source"), mountpoint)
    with raised("TargetStillMounted"):
        target_paths.remove(TargetPath.parse(mountpoint), [str(tmp_path)])


def test_remove_of_a_mount_point_below_a_link_fails(mountpoint: str, tmp_path: Path) -> None:
    root = tmp_path / "link"
    root.symlink_to(tmp_path)
    mount_api.mount_guard(mountpoint)
    with raised("TargetStillMounted"):
        target_paths.remove(TargetPath.parse(f"{root}/target"), [str(root)])


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
