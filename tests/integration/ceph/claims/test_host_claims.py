"""A node's own claim on an image, beside those of virtual machines, on a real cluster."""

import pytest

from crust.ceph import claim_object, claims
from crust.ceph.claim_object import Mode
from crust.ceph.claims import Host
from crust.ceph.fencing import ImageNotCutOff, cut_off
from crust.ceph.host_claims import HostClaim
from crust.core import errors
from crust.host.process import sysfs
from tests.support.ceph.image_claims import IMAGE, Bench
from tests.support.raised import raised

HERE, THERE = Host("node-a", "machine-a"), Host("node-b", "machine-b")


def holders(bench: Bench) -> tuple[claim_object.Holder, ...]:
    return claim_object.read(bench.node().ioctx, IMAGE).claims.holders


def test_claim_is_found_again_and_given_back(bench: Bench) -> None:
    claim = HostClaim(bench.node().image, HERE)
    claim.take(Mode.WRITER, "")
    claim.take(Mode.WRITER, "")
    claim.record("192.0.2.1:0/7")
    assert [each.address for each in holders(bench)] == ["192.0.2.1:0/7"]
    held = claim.held()
    assert held is not None
    assert held.is_host
    claim.give_back()
    claim.give_back()
    assert claim.held() is None
    assert holders(bench) == ()
    with pytest.raises(claims.ImageClaimLost):
        claim.record("192.0.2.1:0/7")


def test_another_machine_or_host_does_not_get_the_image(bench: Bench) -> None:
    image = bench.node().image
    HostClaim(image, HERE).take(Mode.WRITER, "")
    for host in (HERE, THERE):
        with pytest.raises(claims.ImageClaimed, match="the kernel of node node-a"):
            claims.take(image, Mode.WRITER, host, "sandbox", "vm")
    with pytest.raises(claims.ImageClaimed):
        HostClaim(image, THERE).take(Mode.WRITER, "")


@pytest.mark.parametrize("host", [HERE, THERE])
def test_virtual_machines_claim_is_never_taken_over(bench: Bench, host: Host) -> None:
    image = bench.node().image
    claims.take(image, Mode.WRITER, host, "sandbox", "vm")
    with pytest.raises(claims.ImageClaimed, match="sandbox sandbox on node"):
        HostClaim(image, HERE).take(Mode.WRITER, "")
    assert [each.id for each in holders(bench)] == ["vm"]


@pytest.mark.parametrize(
    ("later", "is_taken"),
    [
        (HERE, True),
        (Host("node-a", "another-machine"), False),
        (Host("node-a", ""), False),
    ],
)
def test_claim_of_an_earlier_boot_is_this_hosts_only_by_its_machine_id(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, later: Host, *, is_taken: bool
) -> None:
    client, kernel = bench.node(), bench.node()
    before = HostClaim(client.image, HERE)
    before.take(Mode.WRITER, "")
    kernel.open()
    before.record(kernel.address)
    [mine] = (each.id for each in holders(bench))
    monkeypatch.setattr(sysfs, "boot_id", lambda: "another-boot")
    now = HostClaim(client.image, later)
    if not is_taken:
        with pytest.raises(errors.NotReady) as caught:
            now.take(Mode.WRITER, "")
        assert caught.value.error_name in {"ImageClaimed", "HostNotIdentified"}
        assert [each.id for each in holders(bench)] == [mine]
        return
    with pytest.raises(ImageNotCutOff, match="the kernel of node node-a"):
        now.take(Mode.WRITER, "")
    assert cut_off(bench.controller().image) == (kernel.address,)
    now.take(Mode.WRITER, "")
    assert [each.id for each in holders(bench)] == ["krbd/another-boot/node-a"]


def test_open_image_of_a_stranger_refuses_the_claim(bench: Bench) -> None:
    bench.node().open()
    with raised("ImageWatched"):
        HostClaim(bench.node().image, HERE).take(Mode.WRITER, "")
    assert holders(bench) == ()


def test_hosts_share_an_image_whose_writers_know_of_each_other(bench: Bench) -> None:
    image = bench.node().image
    one, other = (HostClaim(image, Host(each, each)) for each in ("a", "b"))
    one.take(Mode.SHARED, "")
    assert HostClaim(image, Host("a", "a")).held() is not None
    one.record("192.0.2.1:0/7")
    with pytest.raises(claims.ImageClaimed):
        other.take(Mode.WRITER, "")
