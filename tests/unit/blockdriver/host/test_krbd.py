"""RBD's kernel client, by a directory like its sysfs."""

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.blockdriver.host import krbd
from crust.blockdriver.host.krbd import KernelRbd, Login
from crust.core import errors, volumes
from crust.host.block import devices, holders, users
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs
from tests.support.faults import lies

IMAGE = volumes.NetworkImage(FSID, "rbd", "space", "volume-1", (), "")


KEY = "QVFCa2V5"


LOGIN = Login(["192.0.2.1:3300", "192.0.2.2:3300"], "prefer-crc", "node", KEY)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    made = FakeSysfs(tmp_path / "rbd")
    made.load()
    return made


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bytes]]:
    """The keys that the kernel was given."""
    given: list[tuple[str, str, bytes]] = []

    @contextlib.contextmanager
    def thread_key(kind: str, description: str, payload: bytes) -> Iterator[None]:
        given.append((kind, description, payload))
        yield

    monkeypatch.setattr(krbd, "thread_key", thread_key)
    return given


@pytest.fixture
def kernel(sysfs: FakeSysfs, keys: object) -> KernelRbd:
    return KernelRbd("node-a", str(sysfs.bus), sysfs.write, lambda: None)


def test_kernel_that_maps_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is loaded first, if it can be."""
    fake = FakeSysfs(tmp_path / "absent")
    kernel = KernelRbd("node-a", str(fake.bus), fake.write, lambda: None)
    monkeypatch.setattr(krbd, "sees_host_network", lambda: True)
    assert "no driver for RBD" in kernel.obstacle()
    assert replace(kernel, load_module=fake.load).obstacle() == ""
    monkeypatch.setattr(krbd, "sees_host_network", lambda: False)
    assert "hostPID" in kernel.obstacle()


def test_image_is_mapped_with_own_client_and_no_visible_key(
    kernel: KernelRbd, sysfs: FakeSysfs, keys: list[tuple[str, str, bytes]]
) -> None:
    mapping = kernel.map(IMAGE, LOGIN, readonly=False)
    assert mapping.image == IMAGE
    assert not mapping.is_readonly
    [line] = sysfs.lines
    monitors, options, pool, image, snapshot = line.split(" ")
    assert monitors == "192.0.2.1:3300,192.0.2.2:3300"
    assert {"noshare", "name=node", "_pool_ns=space", "ms_mode=prefer-crc"} <= set(
        options.split(",")
    )
    assert not {"exclusive", "ro"} & set(options.split(","))
    assert (pool, image, snapshot) == ("rbd", "volume-1", "-")
    assert KEY not in line
    [(kind, name, payload)] = keys
    assert (kind, payload) == ("ceph", b"AQBkey")
    assert name.startswith("crust.rbd.")
    assert name.endswith(".volume-1")
    assert kernel.find(IMAGE) == mapping


def test_bus_that_is_not_seen_is_not_absent(kernel: KernelRbd, sysfs: FakeSysfs) -> None:
    bus = lies.Concerns(frozenset({str(sysfs.bus), f"{sysfs.bus}/add_single_major"}), ())
    for asked in lies.failures(kernel.obstacle, bus, errnos_of=lies.all_errnos):
        assert isinstance(asked.error, errors.CrustError), str(asked.failure)
    with (
        lies.failing(bus, lies.Failure(0, errno.EIO)),
        pytest.raises(errors.CrustError, match="EIO"),
    ):
        kernel.map(IMAGE, LOGIN, readonly=False)
    assert sysfs.lines == []


def test_mapping_of_reader_is_read_only_and_follows_new_size(kernel: KernelRbd) -> None:
    mapping = kernel.map(IMAGE, LOGIN, readonly=True)
    assert mapping.is_readonly
    assert kernel.size_bytes(mapping) == 1024
    kernel.refresh(mapping)
    assert kernel.size_bytes(mapping) == 2048


def test_mappings_of_other_images_are_not_found(kernel: KernelRbd, sysfs: FakeSysfs) -> None:
    sysfs.add_foreign(0, IMAGE.image)
    assert kernel.find(replace(IMAGE, namespace="")) is None
    kernel.map(IMAGE, LOGIN, readonly=False)
    assert kernel.find(replace(IMAGE, namespace="elsewhere")) is None
    assert kernel.find(replace(IMAGE, cluster="another")) is None
    assert replace(kernel, owner="node-b").find(IMAGE) is None, "a container of the same kernel"
    assert kernel.find(IMAGE) is not None


def test_unmapping_is_idempotent_and_never_forced(
    kernel: KernelRbd, sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "node_of", lambda _: "/dev/rbd0")
    monkeypatch.setattr(users, "in_use", holders.DeviceInUse)
    mapping = kernel.map(IMAGE, LOGIN, readonly=False)
    sysfs.opened.add(mapping.number)
    with pytest.raises(holders.DeviceInUse, match="/dev/rbd0 is in use"):
        kernel.unmap(mapping)
    assert kernel.find(IMAGE) == mapping
    sysfs.opened.clear()
    kernel.unmap(mapping)
    kernel.unmap(mapping)
    assert kernel.find(IMAGE) is None


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENXIO, "features that this kernel does not know"),
        (errno.EACCES, "refuses the user"),
        (errno.ENOENT, "does not exist"),
        (errno.ETIMEDOUT, "did not answer"),
        (errno.EINVAL, "ms_mode"),
    ],
)
def test_refusal_of_kernel_explains_its_errno_without_the_key(
    kernel: KernelRbd, sysfs: FakeSysfs, number: int, why: str
) -> None:
    sysfs.fails = number
    with pytest.raises(krbd.KernelRefusesImage, match=why) as caught:
        kernel.map(IMAGE, LOGIN, readonly=False)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert kernel.find(IMAGE) is None


def test_features_are_named(kernel: KernelRbd) -> None:
    assert kernel.unsupported(0x3D) == ()
    assert kernel.unsupported(0x3D | 1 << 6 | 1 << 40) == ("journaling", "bit 40")


@pytest.mark.parametrize("bad", ["a b", "a,b", "a\n", "x=y"])
def test_no_word_can_become_an_option(kernel: KernelRbd, sysfs: FakeSysfs, bad: str) -> None:
    for image, login in (
        (replace(IMAGE, pool=bad), LOGIN),
        (replace(IMAGE, namespace=bad), LOGIN),
        (IMAGE, Login(["192.0.2.1:3300"], "prefer-crc", bad, KEY)),
        (IMAGE, Login([bad], "prefer-crc", "node", KEY)),
    ):
        with pytest.raises(errors.InvalidRequest):
            kernel.map(image, login, readonly=False)
    assert sysfs.lines == []


def test_key_that_is_no_key_is_refused_without_being_shown(kernel: KernelRbd) -> None:
    with pytest.raises(errors.Refused) as caught:
        kernel.map(IMAGE, Login(["192.0.2.1:3300"], "prefer-crc", "node", "no*key"), readonly=False)
    assert "no*key" not in str(caught.value)
