"""RBD as an engine, as far as no cluster is needed: header, pool and access of a node."""

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from crust.blockdriver import serve
from crust.blockdriver.ceph import failures
from crust.blockdriver.ceph.binding import Ioctx
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.failures import Step
from crust.blockdriver.engines.rbd.node import access
from crust.blockdriver.engines.rbd.node.access import RbdAccess
from crust.blockdriver.engines.rbd.node.volume_users import Users
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.librbd_objects import Header, read_header
from crust.blockdriver.host.krbd import KernelRbd
from crust.blockdriver.settings import DriverSettings
from crust.core import errors, volumes
from crust.core.settings import loading
from tests.support.ceph.fake_sysfs_rbd import FSID, FakeSysfs
from tests.support.raised import raised

ID = b"\x02\x00\x00\x00ab"
SIZE = b"\x16" + (1 << 20).to_bytes(8, "little")
VALUE = b"\x01\x00\x00\x00v"


class Objects:
    """What the cluster answers, by method."""

    def __init__(self, **answers: bytes) -> None:
        self._answers = {"get_id": ID, "get_size": SIZE, "metadata_get": VALUE, **answers}
        self.asked: list[tuple[str, str]] = []

    def execute(self, name: str, cls: str, method: str, data: bytes) -> tuple[int, bytes]:
        """A method of an object class."""
        assert cls == "rbd"
        self.asked.append((name, method))
        return 0, self._answers[method]


def test_header_is_that_of_the_id_of_the_name() -> None:
    objects = Objects()
    assert read_header(cast("Ioctx", objects), "v-1", "key") == Header(1 << 20, "v")
    assert [name for name, _ in objects.asked] == ["rbd_id.v-1", "rbd_header.ab", "rbd_header.ab"]


@pytest.mark.parametrize("method", ["get_id", "get_size", "metadata_get"])
@pytest.mark.parametrize(
    "answer", [b"", b"\xff", b"\x09\x00\x00\x00ab", b"\x02\x00\x00\x00\xff\xff"]
)
def test_another_form_is_refused_by_name(method: str, answer: bytes) -> None:
    with raised("HeaderUnreadable", match="v-1"):
        read_header(cast("Ioctx", Objects(**{method: answer})), "v-1", "key")


class StuckClient:
    """A client of a cluster that answers by now; a connection that is older never learns it."""

    def __init__(self) -> None:
        self.is_open = False
        self.connections = 0

    def check_namespace(self, pool: str, namespace: str) -> None:
        """Connect, if it is not connected, and ask."""
        if not self.is_open:
            self.is_open = True
            self.connections += 1
        if self.connections == 1:
            raise errors.PeerUnavailable.named("CephNotAnswering", "cannot look for the namespace")
        raise errors.NotReady.named("CephNamespaceMissing", namespace)

    def reopen(self) -> None:
        """Connect at the next call."""

    def close(self) -> None:
        self.is_open = False


def test_silent_cluster_is_asked_by_new_connection_next_time() -> None:
    client = StuckClient()
    pool = RbdPool(Place.of(cast("Connection", client), "rbd", "crust"))
    with raised("CephNotAnswering"):
        pool.find()
    with raised("CephNamespaceMissing"):
        pool.find()
    assert client.connections == 2


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
    return RbdAccess(Users(Place(asked, "rbd", "")), str(tmp_path), "node-a", kernel)


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


# The table [rbd]: a node may leave out user and key file, nobody else; and what the engine is then.


PLACE = {"monitors": "[v2:192.0.2.1:3300,v1:192.0.2.1:6789]", "pool": "kubernetes"}
USER = {"user": "crust", "key_file": "/etc/crust/blockdriver/ceph.key"}


def driver(mode: str, **rbd: str) -> DriverSettings:
    flags: dict[str, Any] = {"socket": "/s", "node_id": "n1", "engine": "rbd", "mode": mode}
    flags["rbd"] = {**PLACE, **rbd}
    return loading.load(DriverSettings, "driver", environ={}, flags=flags)


@pytest.mark.parametrize("mode", ["all", "controller"])
def test_user_with_its_key_file_goes_with_each_mode(mode: str) -> None:
    table = driver(mode, **USER).rbd
    assert table is not None
    assert table.user == "crust"


@pytest.mark.parametrize(
    ("mode", "given", "why"),
    [
        ("all", {}, "mode is all: only to a node calls bring keys"),
        ("controller", {}, "mode is controller: only to a node calls bring keys"),
        ("node", USER, "a node keeps no key"),
        ("node", {"user": "crust"}, "set both or none"),
        ("node", {"key_file": "/etc/crust/blockdriver/ceph.key"}, "set both or none"),
    ],
)
def test_half_a_user_is_refused(mode: str, given: dict[str, str], why: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=why):
        driver(mode, **given)


def test_node_without_user_has_engine_that_calls_open(tmp_path: Path) -> None:
    its = driver("node").model_copy(update={"run_dir": str(tmp_path)})
    assert serve.driver_of(its).stores.provisioning.place.is_lent  # type: ignore[attr-defined]
    assert its.rbd is not None
    table = its.rbd.model_copy(update={"monitors": "192.0.2.1"})
    with raised("MonitorsInvalid"):
        serve.driver_of(its.model_copy(update={"rbd": table}))


def _translated(number: int, step: Step) -> errors.CrustError:
    return failures.translated(
        number, "cannot do it", step=step, user="u", monitors="v2:a:1", pool="p"
    )


AGAIN = (
    "ETIMEDOUT ECONNREFUSED ENOTCONN EPIPE EHOSTUNREACH ESTALE EAGAIN EBUSY ECANCELED EROFS EINTR "
    "ESHUTDOWN"
)


@pytest.mark.parametrize("step", get_args(Step))
@pytest.mark.parametrize("name", AGAIN.split())
def test_error_that_a_retry_may_not_get_is_unavailable(name: str, step: Step) -> None:
    assert isinstance(_translated(getattr(errno, name), step), errors.PeerUnavailable)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EDOM, errno.ENOENT, 0, 99999])
def test_anything_else_is_a_failure_with_its_number(number: int) -> None:
    error = _translated(number, "data")
    assert isinstance(error, failures.CephFailed)
    assert str(number) in str(error)


@pytest.mark.parametrize(
    ("number", "step", "name"),
    [
        (errno.EACCES, "connect", "CephKeyRefused"),
        (errno.EINVAL, "connect", "CephKeyRefused"),
        (errno.EPERM, "data", "CephNotPermitted"),
        (errno.EDQUOT, "data", "CephQuotaReached"),
        (errno.ENOSPC, "data", "CephQuotaReached"),
        (errno.ENOENT, "pool", "CephPoolMissing"),
        (errno.ETIMEDOUT, "data", "CephNotAnswering"),
        (errno.ETIMEDOUT, "monitors", "CephMonitorsUnreachable"),
        (errno.ESHUTDOWN, "data", "CephClientBlocklisted"),
        (errno.ESTALE, "data", "CephImageBusy"),
    ],
)
def test_errno_has_its_own_error(number: int, step: Step, name: str) -> None:
    assert _translated(number, step).error_name == name
