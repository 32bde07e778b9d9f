"""A node's side of an image in a real cluster: what a claim of its own host allows and refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.blockdriver.ceph import claim_object, claims, fencing
from crust.blockdriver.ceph.claims import Host, HostClaim
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.engines.pool_access import Access
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.node.access import RbdAccess, _Note
from crust.blockdriver.engines.rbd.node.volume_users import Users
from crust.cli.main import main
from crust.core import volumes
from crust.core.volumes import NetworkImage
from crust.host.process import syscalls
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.image_claims import IMAGE, A, Bench, attached, take
from tests.support.raised import raised

VOLUME = volumes.VolumeId(IMAGE)
Made = Callable[[str], RbdAccess]


@pytest.fixture
def access(
    connection: Connection, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Made:
    """The access of the host with the machine id "machine", by its node name."""
    monkeypatch.setattr(Host, "this", lambda node: Host(node, "machine"))
    place = Namespace.of(connection, POOL, namespace)
    return lambda node: RbdAccess(Users(place), str(tmp_path), node)


@pytest.mark.spec("H-52")
def test_detach_waits_for_a_client_and_no_lost_claim(bench: Bench, access: Made) -> None:
    """Its runtime was restarted when the virtual machine had ended, and has no key; the claim stays."""
    here, client = access("node-a"), bench.node()
    here.attach(VOLUME)
    attached(client, Host("node-a", "machine"))
    with pytest.raises(StillAttached, match="sandbox-1 on node node-a"):
        here.detach(VOLUME)
    client.close()
    here.detach(VOLUME)
    assert here.attached_here() == ()
    with pytest.raises(claims.ImageClaimed):
        claims.take(client.image, claim_object.Mode.WRITER, Host("b", "b"), "two", "vm-2")
    here.attach(VOLUME)
    attached(bench.node(), Host("node-a", "machine"), "sandbox-2")
    [holder] = claim_object.read(client.ioctx, IMAGE).claims.holders
    assert holder.sandbox == "sandbox-2"


@pytest.fixture
def crashed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A boot of the machine "machine" had the image mapped, and wrote; returns its client's address."""
    kernel = bench.node()
    claim = HostClaim(kernel.image, Host("node-a", "machine"))
    claim.take(claim_object.Mode.WRITER, "")
    kernel.open().write(b"x", 0)
    claim.record(kernel.address)
    monkeypatch.setattr(syscalls, "boot_id", lambda: "another-boot")
    return kernel.address


@pytest.mark.parametrize("is_unstage", [True, False], ids=["unstage", "key of another volume"])
def test_claim_of_what_a_boot_before_mapped_is_freed(
    bench: Bench, access: Made, crashed: str, *, is_unstage: bool
) -> None:
    """By a key those of every image: the pod may have moved, so that nobody unstages it here."""
    if is_unstage:
        access("node-a").detach(VOLUME)
    else:
        access("node-a").use(volumes.VolumeId("another"), {})
    assert crashed in bench.blocklist()
    assert claim_object.read(bench.node().ioctx, IMAGE).claims == claim_object.Claims()
    attached(bench.node(), Host("node-b", "b"))


@pytest.mark.parametrize("host", [Host("node-a", "another"), Host("node-b", "machine")])
def test_what_another_host_has_mapped_is_not_freed(
    bench: Bench, access: Made, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    HostClaim(bench.node().image, host).take(claim_object.Mode.WRITER, "")
    monkeypatch.setattr(syscalls, "boot_id", lambda: "another-boot")
    here = access("node-a")
    here.use(VOLUME, {})
    here.detach(VOLUME)
    [holder] = claim_object.read(bench.node().ioctx, IMAGE).claims.holders
    assert (holder.node, holder.machine) == (host.node, host.machine)


def test_what_this_boot_has_mapped_is_not_freed(bench: Bench, access: Made) -> None:
    HostClaim(bench.node().image, Host("node-a", "machine")).take(claim_object.Mode.WRITER, "")
    here = access("node-a")
    here._write_note(_Note(image=NetworkImage("", POOL, "", IMAGE, (), ""), on_host=True))
    here.use(VOLUME, {})
    [holder] = claim_object.read(bench.node().ioctx, IMAGE).claims.holders
    assert holder.is_host


def test_claim_on_image_unmapped_without_key_is_given_back(bench: Bench, access: Made) -> None:
    HostClaim(bench.node().image, Host("node-a", "machine")).take(claim_object.Mode.WRITER, "")
    access("node-a").use(volumes.VolumeId("another"), {})
    assert claim_object.read(bench.node().ioctx, IMAGE).claims == claim_object.Claims()


def test_unstage_succeeds_while_the_cluster_is_silent(ceph: CephCluster, access: Made) -> None:
    with ceph.osd.frozen():
        access("node-a").detach(VOLUME)


@pytest.mark.spec("H-51")
@pytest.mark.parametrize(
    ("name", "machine", "words"),
    [
        ("node-b", "machine", "node-a has this host's machine id"),
        ("node-a", "another-machine", "on node node-a"),
    ],
)
def test_host_with_same_machine_id_or_node_name_is_another(
    bench: Bench, access: Made, name: str, machine: str, words: str
) -> None:
    """Virtual machines that were copied from one disk; and a runtime that has another node name than its driver."""
    here = access(name)
    here.attach(VOLUME)
    attached(bench.node(), Host("node-a", machine))
    with pytest.raises(claims.ImageClaimed, match=words):
        here.attach(VOLUME)
    here.detach(VOLUME)
    assert here.attached_here() == ()


@pytest.mark.spec("H-51")
def test_driver_that_cannot_read_its_machine_id_attaches_nothing(
    bench: Bench, access: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "this", lambda node: Host(node, ""))
    here = access("node-a")
    with raised("HostNotIdentified", match="mount the host's /etc/machine-id"):
        here.attach(VOLUME)
    assert here.attached_here() == ()


@pytest.mark.spec("H-51")
@pytest.mark.parametrize(
    ("has", "mode", "is_shared"),
    [
        (claim_object.Mode.READERS, volumes.AccessMode.MULTI_NODE_READER_ONLY, True),
        (claim_object.Mode.READERS, volumes.AccessMode.SINGLE_NODE_READER_ONLY, False),
        (claim_object.Mode.READERS, volumes.AccessMode.SINGLE_NODE_MULTI_WRITER, False),
        (claim_object.Mode.SHARED, volumes.AccessMode.MULTI_NODE_MULTI_WRITER, True),
        (claim_object.Mode.SHARED, volumes.AccessMode.MULTI_NODE_READER_ONLY, False),
        (claim_object.Mode.WRITER, volumes.AccessMode.MULTI_NODE_READER_ONLY, False),
        (claim_object.Mode.WRITER, volumes.AccessMode.MULTI_NODE_MULTI_WRITER, False),
    ],
)
def test_stage_beside_claim_of_another_host_is_by_access_mode(
    bench: Bench, access: Made, has: claim_object.Mode, mode: volumes.AccessMode, *, is_shared: bool
) -> None:
    here, client = access("node-a"), bench.node()
    claims.take(client.image, has, Host("node-b", "b"), "sandbox-1", "vm-1")
    if is_shared:
        here.attach(VOLUME, Access(mode))
    else:
        with pytest.raises(claims.ImageClaimed, match="node-b"):
            here.attach(VOLUME, Access(mode))
    assert here.attached_here() == ((VOLUME,) if is_shared else ())


def run(bench: Bench, *words: str, key: str | None = None) -> tuple[int, str]:
    """Exit code and output of a command of the controller's user."""
    user = f"operator-{bench.namespace}"
    own = bench.ceph.controller(user, bench.namespace)
    where = ("--monitors", bench.ceph.monitors, "--user", user, "--pool", POOL)
    argv = ["ceph", words[0], *where, "--namespace", bench.namespace, *words[1:]]
    done = CliRunner().invoke(main, argv, input=f"{own if key is None else key}\n")
    return done.exit_code, done.output


def test_claims_are_listed_with_node_sandbox_and_client(bench: Bench) -> None:
    client = bench.node()
    attached(client, A)
    code, output = run(bench, "claims")
    assert code == 0
    assert f"{IMAGE}  writer  node node-a  sandbox sandbox-1  {client.address}" in output


@pytest.mark.spec("H-53")
def test_connected_node_is_fenced_only_if_the_operator_insists(bench: Bench) -> None:
    client = bench.node()
    attached(client, A)
    code, output = run(bench, "fence", "node-a")
    assert (code, "[HolderConnected]" in output) == (1, True)
    code, output = run(bench, "fence", "node-a", "--even-if-connected")
    assert (code, output) == (0, f"{IMAGE}: free; blocklisted {client.address}\n")
    assert claim_object.read(bench.controller().ioctx, IMAGE).cookie == ""


@pytest.mark.parametrize("where", [(), ("--image", IMAGE)])
def test_node_without_a_claim_names_the_others(bench: Bench, where: tuple[str, ...]) -> None:
    take(bench.node(), A)
    code, output = run(bench, "fence", "node-z", *where)
    assert (code, "[NodeWithoutClaim]" in output, "node-a" in output) == (1, True, True)


def test_fencing_that_was_interrupted_is_repeated(bench: Bench) -> None:
    client, controller = bench.node(), bench.controller()
    attached(client, A)
    claim_object.changed(controller.ioctx, IMAGE, lambda now: fencing.with_ended(now, now.holders))
    code, output = run(bench, "fence", "node-a")
    assert (code, output) == (0, f"{IMAGE}: free; blocklisted {client.address}\n")


@pytest.mark.parametrize(
    ("words", "key", "code", "why"),
    [
        (("claims",), "AQD0000000000000000000000000000000000000==", 1, "[CephKeyRefused]"),
        (("claims",), "", 2, "standard input"),
        (("caps", "vol-2"), None, 1, "[CephImageMissing]"),
    ],
    ids=["wrong key", "no key", "no volume"],
)
def test_command_that_cannot_succeed_says_why_without_the_key(
    bench: Bench, words: tuple[str, ...], key: str | None, code: int, why: str
) -> None:
    exit_code, output = run(bench, *words, key=key)
    assert (exit_code, why in output, "AQD0000" in output) == (code, True, False)


def test_capabilities_of_one_volume_are_printed_for_ceph_auth(bench: Bench) -> None:
    code, output = run(bench, "caps", IMAGE)
    assert code == 0
    key = bench.ceph.user(f"volume-{bench.namespace}", {"mon": "allow r", "osd": output.strip()})
    with bench.client(f"volume-{bench.namespace}", key).open() as image:
        image.write(b"mine", 0)
