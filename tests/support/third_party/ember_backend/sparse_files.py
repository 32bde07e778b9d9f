"""A backend of OpenStack Cinder for one machine: sparse files, attached as loop devices by os-brick.

It runs in Ember's environment, not in crust's, and knows nothing of crust.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from cinder import interface
from cinder.volume import driver

GIB = 1 << 30
_DIRECTORY = os.environ["VOLUMES_DIR"]


@interface.volumedriver
class SparseFiles(driver.VolumeDriver):  # type: ignore[misc]
    """A file per volume, by the id of the volume; sizes are GiB, as everywhere in Cinder."""

    VERSION = "1.0.0"

    def do_setup(self, context: Any) -> None:
        """Nothing to connect to."""

    def check_for_setup_error(self) -> None:
        """Nothing to check."""

    def create_volume(self, volume: Any) -> None:
        with open(_path(volume), "wb") as file:
            file.truncate(int(volume.size * GIB))

    def delete_volume(self, volume: Any) -> None:
        """Repeatable."""
        if os.path.exists(_path(volume)):
            os.remove(_path(volume))

    def create_cloned_volume(self, volume: Any, src_vref: Any) -> None:
        """A copy, at the size of the new volume."""
        self._copy(src_vref, volume)

    def create_snapshot(self, snapshot: Any) -> None:
        _run("cp", "--sparse=always", "--reflink=auto", _path(snapshot.volume), _path(snapshot))

    def create_volume_from_snapshot(self, volume: Any, snapshot: Any) -> None:
        """A copy, at the size of the new volume."""
        self._copy(snapshot, volume)

    def delete_snapshot(self, snapshot: Any) -> None:
        """Repeatable."""
        self.delete_volume(snapshot)

    def _copy(self, source: Any, volume: Any) -> None:
        _run("cp", "--sparse=always", "--reflink=auto", _path(source), _path(volume))
        os.truncate(_path(volume), int(volume.size * GIB))

    def extend_volume(self, volume: Any, new_size: float) -> None:
        """The file, and the device if there is one."""
        with open(_path(volume), "r+b") as file:
            file.truncate(int(new_size * GIB))
        for device in _devices(volume):
            _run("losetup", "--set-capacity", device)

    def create_export(self, context: Any, volume: Any, connector: Any = None) -> dict[str, str]:
        """Files need none."""
        return {}

    def ensure_export(self, context: Any, volume: Any) -> dict[str, str]:
        """Files need none."""
        return {}

    def remove_export(self, context: Any, volume: Any) -> None:
        """Files have none."""

    def initialize_connection(self, volume: Any, connector: Any, **_: Any) -> dict[str, Any]:
        """The loop device, in the form that os-brick's local connector takes."""
        devices = _devices(volume) or [_run("losetup", "--find", "--show", _path(volume)).strip()]
        data = {"device_path": devices[0], "volume_id": volume.id}
        return {"driver_volume_type": "local", "data": data}

    def terminate_connection(self, volume: Any, connector: Any, **_: Any) -> None:
        """Repeatable."""
        for device in _devices(volume):
            _run("losetup", "--detach", device)

    def get_volume_stats(self, refresh: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 - Cinder's signature
        """One pool of 100 GiB."""
        pool = {
            "pool_name": "files",
            "total_capacity_gb": 100,
            "free_capacity_gb": 90,
            "provisioned_capacity_gb": 1,
            "reserved_percentage": 0,
            "max_over_subscription_ratio": 10,
            "thin_provisioning_support": True,
            "thick_provisioning_support": False,
            "multiattach": True,
            "QoS_support": False,
        }
        return {
            "volume_backend_name": "files",
            "vendor_name": "tests",
            "driver_version": self.VERSION,
            "storage_protocol": "local",
            "pools": [pool],
        }


def _path(volume: Any) -> str:
    return os.path.join(_DIRECTORY, volume.id)


def _devices(volume: Any) -> list[str]:
    """By the kernel's own files: losetup(8) may miss one while others come and go."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    backing = os.path.realpath(_path(volume))
    return [f"/dev/{file.parts[3]}" for file in files if _text(file).rstrip("\n") == backing]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it was detached meanwhile
        return ""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
