"""What a node answers of an image of Ceph without asking the cluster."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from crust import volumes
from crust.blockdriver.engines.rbd.node import access
from crust.blockdriver.engines.rbd.node.access import RbdAccess
from crust.blockdriver.engines.rbd.place import Place
from crust.host.block.krbd import KernelRbd
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs

VOLUME = volumes.VolumeId("0123456789abcdef-1")
DEVICE = volumes.BlockSource("/dev/rbd0", volumes.DeviceIdentity(251, 0, 0))


class NoCluster:
    """Users of a cluster that must not be asked."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        raise AssertionError

    def place(self, volume_id: volumes.VolumeId) -> Place:
        raise AssertionError

    @property
    def shared(self) -> Place:
        raise AssertionError

    def forget(self, volume_id: volumes.VolumeId) -> None:
        raise AssertionError


def note(run_dir: Path, *, on_host: bool) -> None:
    directory = Path(access.directory(str(run_dir)))
    directory.mkdir(parents=True)
    text = {"cluster": FSID, "pool": "rbd", "namespace": "", "on_host": on_host, "is_image": True}
    (directory / VOLUME).write_text(json.dumps(text))


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    made = FakeSysfs(tmp_path / "bus")
    made.load()
    return made


@pytest.fixture
def node(tmp_path: Path, sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch) -> RbdAccess:
    monkeypatch.setattr(KernelRbd, "device", lambda _kernel, _mapping: DEVICE)
    kernel = KernelRbd("node-a", str(sysfs.bus), sysfs.write, lambda: None)
    return RbdAccess(NoCluster(), str(tmp_path), "node-a", kernel)


def mapped(sysfs: FakeSysfs, node: RbdAccess) -> None:
    """As the node itself has mapped the image."""
    mark = node._devices.kernel._mark
    sysfs.write(
        f"{sysfs.bus}/add_single_major",
        f"192.0.2.1:6789 name=node,key={mark}{VOLUME} rbd {VOLUME} -".encode(),
    )


def test_image_for_a_hypervisor_is_no_device_and_the_cluster_is_not_asked(
    node: RbdAccess, sysfs: FakeSysfs, tmp_path: Path
) -> None:
    note(tmp_path, on_host=False)
    mapped(sysfs, node)
    assert node.host_device(VOLUME) is None


def test_mapped_image_is_a_device_and_the_cluster_is_not_asked(
    node: RbdAccess, sysfs: FakeSysfs, tmp_path: Path
) -> None:
    assert node.host_device(VOLUME) is None
    note(tmp_path, on_host=True)
    assert node.host_device(VOLUME) is None
    mapped(sysfs, node)
    found = node.host_device(VOLUME)
    assert found is not None
    assert found.device == DEVICE
