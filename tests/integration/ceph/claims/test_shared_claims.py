"""Writers of several nodes that share a raw image in a real cluster: each has a claim, each can be cut off alone."""

from typing import Any

import pytest

from crust.blockdriver.ceph import claim_object, claims, fencing
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host, HostClaim
from crust.blockdriver.ceph.fencing import ImageNotCutOff, cut_off
from crust.core import errors
from crust.host.process import syscalls
from tests.support.ceph.image_claims import (
    IMAGE,
    A,
    B,
    Bench,
    Client,
    at_once,
    check_cut_off,
    take,
    write,
)
from tests.support.raised import raised

C = Host("node-c", "machine-c")


def shared(client: Client, host: Host, sandbox: str = "sandbox") -> tuple[Any, str]:
    """The steps of an attach; the open image and the holder's id."""
    holder = take(client, host, sandbox, Mode.SHARED)
    image = client.open()
    assert claims.record(client.image, holder.id) == client.address
    return image, holder.id


def nodes_of(client: Client) -> list[str]:
    return sorted(holder.node for holder in claim_object.read(client.ioctx, IMAGE).claims.holders)


@pytest.mark.spec("H-51")
def test_writers_of_two_nodes_share_image_and_see_each_other(bench: Bench) -> None:
    first, second = bench.node(), bench.node()
    of_a, holder = shared(first, A)
    of_b, _ = shared(second, B)
    write(of_a, b"of A")
    write(of_b, b"of B", 4096)
    assert (of_b.read(0, 4), of_a.read(4096, 4)) == (b"of A", b"of B")
    both = claim_object.read(first.ioctx, IMAGE).claims
    addresses = {holder.node: holder.address for holder in both.holders}
    assert (both.mode, addresses) == (
        Mode.SHARED,
        {A.node: first.address, B.node: second.address},
    )
    first.close()
    claims.give_back(first.image, holder)
    assert nodes_of(second) == [B.node]


@pytest.mark.spec("H-51")
@pytest.mark.parametrize(
    ("has", "wants"),
    [
        (Mode.SHARED, Mode.WRITER),
        (Mode.SHARED, Mode.READERS),
        (Mode.WRITER, Mode.SHARED),
        (Mode.READERS, Mode.SHARED),
        (Mode.WRITER, Mode.READERS),
        (Mode.READERS, Mode.WRITER),
        (Mode.WRITER, Mode.WRITER),
    ],
)
def test_holders_of_another_mode_exclude_each_other(bench: Bench, has: Mode, wants: Mode) -> None:
    first, second = bench.node(), bench.node()
    take(first, A, "sandbox-1", has)
    with pytest.raises(claims.ImageClaimed, match="sandbox-1 on node node-a"):
        claims.check_claimable(second.ioctx, IMAGE, wants, B)
    with pytest.raises(claims.ImageClaimed, match="sandbox-1 on node node-a"):
        take(second, B, "sandbox-2", wants)
    assert nodes_of(second) == [A.node]


@pytest.mark.spec("H-52")
def test_second_writer_waits_until_the_firsts_client_is_recorded(bench: Bench) -> None:
    first, second = bench.node(), bench.node()
    holder = take(first, A, "sandbox-1", Mode.SHARED)
    with raised("ImageBeingOpened", match="node-a"):
        take(second, B, "sandbox-2", Mode.SHARED)
    first.open()
    claims.record(first.image, holder.id)
    shared(second, B)
    assert nodes_of(first) == [A.node, B.node]


@pytest.mark.spec("H-52")
def test_concurrent_writers_that_are_admitted_have_addresses_of_their_own(bench: Bench) -> None:
    clients = [bench.node() for _ in range(4)]
    let_in: dict[str, str] = {}

    def run(number: int) -> None:
        host = Host(f"node-{number}", f"machine-{number}")
        try:
            shared(clients[number], host)
        except errors.NotReady as err:
            if err.error_name not in {"ImageBeingOpened", "ImageWatched"}:
                raise
            return
        let_in[host.node] = clients[number].address

    at_once(len(clients), run)
    admitted = claim_object.read(clients[0].ioctx, IMAGE).claims.holders
    assert let_in
    assert {holder.node: holder.address for holder in admitted} == let_in


@pytest.mark.spec("H-51")
def test_host_takes_over_its_own_writer_and_leaves_the_others(bench: Bench) -> None:
    """The virtual machine ended without closing the image; another one of its host has the volume now."""
    first, second, again = bench.node(), bench.node(), bench.node()
    shared(first, A, "sandbox-1")
    of_b, _ = shared(second, B)
    with pytest.raises(fencing.ImageNotCutOff, match="sandbox-1"):
        shared(again, A, "sandbox-2")
    assert fencing.cut_off(bench.controller().image) == (first.address,)
    of_a, _ = shared(again, A, "sandbox-2")
    own, other = sorted(holders(bench), key=lambda holder: holder.node)
    assert (own.sandbox, own.address) == ("sandbox-2", again.address)
    assert (other.node, other.address) == (B.node, second.address)
    write(of_a, b"a")
    write(of_b, b"b")


@pytest.mark.spec("H-53")
def test_fencing_of_one_writer_leaves_the_others(bench: Bench) -> None:
    first, second, third = bench.node(), bench.node(), bench.node()
    controller = bench.controller()
    of_a, _ = shared(first, A)
    of_b, _ = shared(second, B)
    of_a.write(b"of A", 0)
    of_a.flush()  # it has RBD's lock
    cut = fencing.fence(controller.image, A.node, even_if_connected=True)
    assert cut == (first.address,)
    assert nodes_of(second) == [B.node]
    write(of_b, b"of B")
    check_cut_off(of_a)
    assert of_b.read(0, 4) == b"of B"
    of_c, _ = shared(third, C)
    write(of_c, b"of C")
    assert second.address not in bench.blocklist()
    with pytest.raises(claims.ImageClaimed):
        take(third, C, "sandbox", Mode.WRITER)


@pytest.mark.spec("H-53")
def test_fencing_of_writer_that_had_not_opened_image_leaves_others(bench: Bench) -> None:
    """Whoever has it open and is no recorded holder may be that writer's client."""
    first, second, controller = bench.node(), bench.node(), bench.controller()
    of_b, _ = shared(second, B)
    take(first, A, "sandbox", Mode.SHARED)
    first.open()
    cut = fencing.fence(controller.image, A.node)
    assert cut == (first.address,)
    write(of_b, b"of B")
    assert nodes_of(second) == [B.node]


@pytest.mark.spec("H-53")
def test_fencing_of_a_reader_leaves_clients_of_other_readers(bench: Bench) -> None:
    """The clients of readers are not recorded, so any of them may be a living reader's: a blocklist lasts years."""
    first, second, controller = bench.node(), bench.node(), bench.controller()
    take(first, A, "sandbox", Mode.READERS)
    first.open()
    take(second, B, "sandbox", Mode.READERS)
    of_b = second.open()
    assert fencing.fence(controller.image, A.node) == ()
    assert second.address not in bench.blocklist()
    assert of_b.read(0, 4) == bytes(4)
    assert nodes_of(second) == [B.node]


def holders(bench: Bench) -> tuple[claim_object.Holder, ...]:
    return claim_object.read(bench.node().ioctx, IMAGE).claims.holders


def test_claim_is_found_again_and_given_back(bench: Bench) -> None:
    claim = HostClaim(bench.node().image, A)
    claim.take(Mode.WRITER, "")
    claim.take(Mode.WRITER, "")
    claim.record("192.0.2.1:0/7")
    assert [holder.address for holder in holders(bench)] == ["192.0.2.1:0/7"]
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
    HostClaim(image, A).take(Mode.WRITER, "")
    for host in (A, B):
        with pytest.raises(claims.ImageClaimed, match="the kernel of node node-a"):
            claims.take(image, Mode.WRITER, host, "sandbox", "vm")
    with pytest.raises(claims.ImageClaimed):
        HostClaim(image, B).take(Mode.WRITER, "")


@pytest.mark.parametrize("host", [A, B])
def test_virtual_machines_claim_is_never_taken_over(bench: Bench, host: Host) -> None:
    image = bench.node().image
    claims.take(image, Mode.WRITER, host, "sandbox", "vm")
    with pytest.raises(claims.ImageClaimed, match="sandbox sandbox on node"):
        HostClaim(image, A).take(Mode.WRITER, "")
    assert [holder.id for holder in holders(bench)] == ["vm"]


@pytest.mark.parametrize(
    ("later", "is_taken"),
    [(A, True), (Host("node-a", "another-machine"), False), (Host("node-a", ""), False)],
)
def test_claim_of_earlier_boot_needs_this_hosts_machine_id(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, later: Host, *, is_taken: bool
) -> None:
    client, kernel = bench.node(), bench.node()
    before = HostClaim(client.image, A)
    before.take(Mode.WRITER, "")
    kernel.open()
    before.record(kernel.address)
    [mine] = (holder.id for holder in holders(bench))
    monkeypatch.setattr(syscalls, "boot_id", lambda: "another-boot")
    now = HostClaim(client.image, later)
    if not is_taken:
        with pytest.raises(errors.NotReady) as caught:
            now.take(Mode.WRITER, "")
        assert caught.value.error_name in {"ImageClaimed", "HostNotIdentified"}
        assert [holder.id for holder in holders(bench)] == [mine]
        return
    with pytest.raises(ImageNotCutOff, match="the kernel of node node-a"):
        now.take(Mode.WRITER, "")
    assert cut_off(bench.controller().image) == (kernel.address,)
    now.take(Mode.WRITER, "")
    assert [holder.id for holder in holders(bench)] == ["krbd/another-boot/node-a"]
