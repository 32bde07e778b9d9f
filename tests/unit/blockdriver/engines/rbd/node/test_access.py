"""The access of a node to images in Ceph, as far as no cluster is needed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.node import access
from crust.blockdriver.engines.rbd.node.access import RbdAccess
from crust.blockdriver.engines.rbd.node.volume_users import Users
from crust.blockdriver.host.krbd import KernelRbd
from crust.core import volumes
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs

VOLUME = volumes.VolumeId("0123456789abcdef-1")
DEVICE = volumes.BlockSource("/dev/rbd0", volumes.DeviceIdentity(251, 0, 0))


def asked(failure: str) -> Connection:
    """The connection to a cluster that must not be asked."""
    raise AssertionError(failure)


def note(run_dir: Path, *, on_host: bool) -> None:
    directory = Path(access.directory(str(run_dir)))
    directory.mkdir(parents=True)
    image = volumes.NetworkImage(FSID, "rbd", "", VOLUME, (), "node")
    text = {"image": asdict(image), "on_host": on_host, "is_image": True}
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
    return RbdAccess(Users(Namespace(asked, "rbd", "")), str(tmp_path), "node-a", kernel)


def mapped(sysfs: FakeSysfs, node: RbdAccess) -> None:
    """As the node itself has mapped the image."""
    mark = node._devices.kernel._mark
    sysfs.write(
        f"{sysfs.bus}/add_single_major",
        f"192.0.2.1:6789 name=node,key={mark}{VOLUME} rbd {VOLUME} -".encode(),
    )


def test_image_for_hypervisor_is_no_device_without_asking_cluster(
    node: RbdAccess, sysfs: FakeSysfs, tmp_path: Path
) -> None:
    note(tmp_path, on_host=False)
    mapped(sysfs, node)
    assert node.host_device(VOLUME) is None


def test_mapped_image_is_a_device_without_asking_the_cluster(
    node: RbdAccess, sysfs: FakeSysfs, tmp_path: Path
) -> None:
    assert node.host_device(VOLUME) is None
    note(tmp_path, on_host=True)
    assert node.host_device(VOLUME) is None
    mapped(sysfs, node)
    attachment = node.host_device(VOLUME)
    assert attachment is not None
    assert attachment.device == DEVICE
