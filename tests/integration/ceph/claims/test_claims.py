"""One writer of an image in a real cluster: claims by compare-and-swap, and fencing that lasts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from crust.blockdriver.ceph import claim_object, claims, cluster_image, fencing, omap
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.connection import Connection
from tests.support.ceph.image_claims import (
    IMAGE,
    LONG_S,
    A,
    B,
    Bench,
    Client,
    at_once,
    attached,
    check_cut_off,
    take,
    write,
)
from tests.support.faults.crashes import Killed
from tests.support.raised import raised


@pytest.mark.spec("H-51")
def test_of_two_takers_one_gets_the_image(bench: Bench) -> None:
    clients = [bench.node() for _ in range(4)]
    won: list[int] = []

    def run(number: int) -> None:
        host = Host(f"node-{number}", f"machine-{number}")
        try:
            take(clients[number], host)
        except claims.ImageClaimed:
            return
        won.append(number)

    at_once(len(clients), run)
    assert len(won) == 1
    [holder] = claim_object.read(clients[0].ioctx, IMAGE).claims.holders
    assert holder.node == f"node-{won[0]}"


@pytest.mark.spec("H-51")
def test_image_opened_by_unknown_client_is_refused_and_not_claimed(bench: Bench) -> None:
    stranger, client = bench.node(), bench.node()
    stranger.open()
    with raised("ImageWatched", match=stranger.address):
        take(client, A, "sandbox")
    assert claim_object.read(client.ioctx, IMAGE).cookie == ""


@pytest.mark.spec("H-52")
def test_address_of_the_client_that_opened_the_image_is_recorded(bench: Bench) -> None:
    client = bench.node()
    attached(client, A)
    [holder] = claim_object.read(client.ioctx, IMAGE).claims.holders
    assert (holder.address, holder.node, holder.machine) == (client.address, A.node, A.machine)


@pytest.mark.spec("H-52")
def test_nothing_is_recorded_if_nobody_has_opened_the_image(bench: Bench) -> None:
    client = bench.node()
    holder = take(client, A, "sandbox")
    with raised("ImageNotOpened", match="0 new clients"):
        claims.record(client.image, holder.id)


def test_virtual_machine_that_takes_its_image_again_keeps_it(bench: Bench) -> None:
    """Its runtime was restarted: RBD's lock must not be broken, because the hypervisor has it."""
    client, again = bench.node(), bench.node()
    image, holder = attached(client, A)
    write(image, b"x")
    same = take(again, A, vm=holder)
    assert same.address == client.address
    assert claims.record(again.image, holder) == client.address
    with again.image.opened() as opened:
        assert cluster_image.lockers(opened) == {client.address}


@pytest.mark.spec("H-51")
def test_host_without_machine_id_takes_nothing(bench: Bench) -> None:
    """Two clusters of Kubernetes with one node name, whose runtimes are containers with an empty /etc/machine-id."""
    unknown = Host("node-a", "")
    with raised("HostNotIdentified", match="mount the host's /etc/machine-id"):
        take(bench.node(), unknown)
    assert claim_object.read(bench.node().ioctx, IMAGE).cookie == ""
    holder = claim_object.Holder("vm-1", "node-a", "", "sandbox-1", "")
    assert not holder.is_on("node-a", "")


@pytest.mark.parametrize("content", [None, "", "uninitialized\n", "0123\n"])
def test_machine_id_that_identifies_no_machine_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(claims, "MACHINE_ID", str(tmp_path / "machine-id"))
    if content is not None:
        (tmp_path / "machine-id").write_text(content)
    assert Host.this("node-a") == Host("node-a", "")
    (tmp_path / "machine-id").write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    assert Host.this("node-a").machine == "3d1219c7c4c5404aaa1f6d2a48adfda4"


@pytest.mark.spec("H-51")
def test_readers_share_an_image_and_refuse_a_writer(bench: Bench) -> None:
    first, second = bench.node(), bench.node()
    one = take(first, A, "sandbox-1", Mode.READERS)
    first.open()
    two = take(second, B, "sandbox-2", Mode.READERS)
    with pytest.raises(claims.ImageClaimed):
        take(second, B, "sandbox-3")
    claims.give_back(first.image, one.id)
    [left] = claim_object.read(first.ioctx, IMAGE).claims.holders
    assert left.node == B.node
    claims.give_back(second.image, two.id)


@pytest.mark.spec("H-53")
def test_writes_of_fenced_client_fail_and_synced_data_stays(bench: Bench) -> None:
    first, second, controller = bench.node(), bench.node(), bench.controller()
    image, _ = attached(first, A)
    write(image, b"synced")
    cut = fencing.fence(controller.image, A.node, even_if_connected=True)
    assert cut == (first.address,)
    after, _ = attached(second, B)
    assert after.read(0, 6) == b"synced"
    write(after, b"of B__")
    check_cut_off(image)
    assert after.read(0, 6) == b"of B__"


def test_fencing_of_a_node_that_has_no_claim_changes_nothing(bench: Bench) -> None:
    first, controller = bench.node(), bench.controller()
    attached(first, A)
    assert fencing.fence(controller.image, B.node) == ()
    assert len(claim_object.read(first.ioctx, IMAGE).claims.holders) == 1


@pytest.mark.spec("H-52")
def test_holder_fenced_before_it_recorded_its_client_gets_an_error(bench: Bench) -> None:
    """Its runtime was frozen between the two steps: it must not give the disk to the guest."""
    first, controller = bench.node(), bench.controller()
    holder = take(first, A, "sandbox")
    fencing.fence(controller.image, A.node)
    first.open()
    with pytest.raises(claims.ImageClaimLost):
        claims.record(first.image, holder.id)


@pytest.mark.spec("H-53")
def test_holder_giving_back_while_fenced_does_not_free_image(bench: Bench) -> None:
    """The fencing has moved it to the ended, and has not blocklisted its client yet."""
    first, second, controller = bench.node(), bench.node(), bench.controller()
    _, holder = attached(first, A)
    ended = claim_object.changed(
        controller.ioctx, IMAGE, lambda now: fencing.with_ended(now, now.holders)
    )
    claims.give_back(first.image, holder)
    assert claim_object.read(controller.ioctx, IMAGE).claims == ended
    with pytest.raises(fencing.ImageNotCutOff):
        take(second, B)
    assert fencing.cut_off(controller.image) == (first.address,)
    attached(second, B)


@pytest.mark.spec("H-53")
def test_only_recorded_clients_are_cut_off_if_all_are_recorded(bench: Bench) -> None:
    first, stranger, controller = bench.node(), bench.node(), bench.controller()
    attached(first, A)
    stranger.open()
    controller.open()
    cut = fencing.fence(controller.image, A.node, even_if_connected=True)
    assert cut == (first.address,)


@pytest.mark.spec("H-53")
def test_unknown_client_is_cut_off_but_not_the_controller(bench: Bench) -> None:
    """The fencing client has the image open, and so has a controller that flattens it."""
    first, other, controller = bench.node(), bench.controller(), bench.controller()
    take(first, A)
    first.open()
    controller.open()
    other.lead()
    other.open()
    cut = fencing.fence(controller.image, A.node)
    assert cut == (first.address,)


@pytest.mark.spec("H-52")
def test_active_controller_is_no_stranger_to_a_holder(bench: Bench) -> None:
    client, other = bench.node(), bench.controller()
    other.lead()
    other.open()
    attached(client, A)
    [holder] = claim_object.read(client.ioctx, IMAGE).claims.holders
    assert holder.address == client.address


@pytest.mark.spec("H-53")
@pytest.mark.parametrize("recorded", [True, False])
def test_overtaken_fencing_does_not_cut_off_next_holder(
    bench: Bench, *, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, and the next holder's attach, come between its look at the claims and its blocklisting."""
    first, second = bench.node(), bench.node()
    late, other = bench.controller(), bench.controller()
    if recorded:
        attached(first, A)
    else:
        take(first, A)
    looked = fencing._addresses

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(fencing, "_addresses", looked)
        fencing.fence(other.image, A.node, even_if_connected=True)
        attached(second, A, "sandbox-2")
        return looked(*arguments)

    monkeypatch.setattr(fencing, "_addresses", overtaken)
    fencing.fence(late.image, A.node, even_if_connected=True)
    assert second.address not in bench.blocklist()
    [holder] = claim_object.read(late.ioctx, IMAGE).claims.holders
    assert (holder.sandbox, holder.address) == ("sandbox-2", second.address)


@dataclass(frozen=True)
class Interrupted:
    """A client; `step` is called before it blocklists, and after that."""

    inner: Connection
    step: Callable[[], object]

    def address(self) -> str:
        return self.inner.address()

    def blocklist(self, addresses: Iterable[str]) -> None:
        self.step()
        self.inner.blocklist(addresses)
        self.step()


@pytest.mark.spec("H-53")
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
def test_killed_fencing_frees_no_image_until_next_completes_it(
    bench: Bench, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark, the blocklist, the lock, the removal: killed before each of them."""
    first, second, controller = bench.node(), bench.node(), bench.controller()
    image, _ = attached(first, A)
    image.write(b"x", 0)
    count = [0]
    real = omap.swap

    def step() -> None:
        count[0] += 1
        if count[0] == dies_at:
            raise Killed

    def swap(*arguments: Any) -> Any:
        step()
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(omap, "swap", swap)
        dying = replace(
            controller.image, client=cast("Connection", Interrupted(controller.connection, step))
        )
        with pytest.raises(Killed):
            fencing.fence(dying, A.node, even_if_connected=True)
    with pytest.raises((claims.ImageClaimed, fencing.ImageNotCutOff)):
        take(second, B, "sandbox-2")
    fencing.fence(controller.image, A.node, even_if_connected=True)
    assert bench.blocklist()[first.address] > LONG_S
    after, _ = attached(second, B)
    write(after, b"y")
    check_cut_off(image)


@pytest.mark.spec("H-53")
def test_holder_ending_during_another_fencing_is_still_cut_off(bench: Bench) -> None:
    """The cutting off that is late frees only those that it has cut off itself."""
    first, second, controller = bench.node(), bench.node(), bench.controller()
    for client, host in ((first, A), (second, B)):
        holder = take(client, host, "sandbox", Mode.SHARED)
        client.open()
        claims.record(client.image, holder.id)
    claims.give_back(first.image, first_holder(controller, A))
    steps = iter((lambda: claims.give_back(second.image, first_holder(controller, B)), str))
    late = Interrupted(controller.connection, lambda: next(steps)())
    assert fencing.cut_off(replace(controller.image, client=cast("Connection", late))) == (
        first.address,
    )
    [left] = claim_object.read(controller.ioctx, IMAGE).claims.ended
    assert left.address == second.address
    assert second.address not in bench.blocklist()
    assert fencing.cut_off(controller.image) == (second.address,)


def first_holder(client: Client, host: Host) -> str:
    holders = claim_object.read(client.ioctx, IMAGE).claims.holders
    [holder] = [holder for holder in holders if holder.node == host.node]
    return holder.id


def test_only_lock_of_client_that_is_cut_off_is_broken(bench: Bench) -> None:
    first, second, controller = bench.node(), bench.node(), bench.controller()
    image, _ = attached(first, A)
    write(image, b"x")
    controller.image.break_locks(frozenset({second.address}))
    with controller.image.opened() as opened:
        assert cluster_image.lockers(opened) == {first.address}
    controller.image.break_locks(frozenset({first.address}))
    with controller.image.opened() as opened:
        assert cluster_image.lockers(opened) == frozenset()


class DoesNotBlocklist(Interrupted):
    """The cluster has the entry, and an OSD does not know it yet."""

    def blocklist(self, addresses: Iterable[str]) -> None:
        """Nothing."""


@pytest.mark.spec("H-53")
def test_image_watched_by_blocklisted_client_is_not_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, controller = bench.node(), bench.node(), bench.controller()
    attached(first, A)
    monkeypatch.setattr(fencing, "WATCH_GONE_S", 0.3)
    client = cast("Connection", DoesNotBlocklist(controller.connection, str))
    with raised("StillWatched", match=first.address):
        fencing.fence(replace(controller.image, client=client), A.node, even_if_connected=True)
    with pytest.raises(fencing.ImageNotCutOff):
        take(second, B)


@pytest.mark.parametrize(
    "claims",
    [b'{"schema": 2}', b'{"schema": 0}', b"{}", b'{"holders": []}', b'{"schema": 1, "mode": ""}'],
)
def test_claim_that_cannot_be_read_is_nobodys(bench: Bench, claims: bytes) -> None:
    client = bench.node()
    unreadable = {"cookie": b"x", "claims": claims}
    omap.swap(client.ioctx, f"{claim_object.PREFIX}{IMAGE}", None, unreadable)
    with pytest.raises(claim_object.UnreadableImageClaim):
        take(client, A, "sandbox")
    assert list(claim_object.images(client.ioctx)) == [IMAGE]
