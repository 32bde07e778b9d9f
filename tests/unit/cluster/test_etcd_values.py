"""Keys, values and certificates of the store in etcd, without an etcd."""

import dataclasses
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from crust.cluster.etcd import records
from crust.cluster.etcd.client import certificates, failures
from crust.cluster.etcd.client.watches import Changes, Listing
from crust.cluster.etcd.keys import ANNOUNCE, ANSWER, POOL, REQUEST, Key, Keys
from crust.cluster.etcd.mirror import Mirror, RequestKey
from crust.cluster.protocol import Answer, Request
from crust.wire.etcd.v3 import etcd_pb2 as pb
from examples.cluster.authority import DAY, Authority
from tests.support.cluster.cluster_contract import announcement

KEYS = Keys("/crust/")


@given(some.text(min_size=1, max_size=40), some.text(min_size=1, max_size=40))
def test_keys_of_any_names_are_parsed_back_and_stay_in_their_directory(
    node: str, each: str
) -> None:
    begin, end = KEYS.node(node)
    for made, parsed in (
        (KEYS.announce(node), Key("nodes", node, ANNOUNCE)),
        (KEYS.request(node, each), Key("nodes", node, REQUEST, each)),
        (KEYS.answer(node, each), Key("nodes", node, ANSWER, each)),
        (KEYS.pool(node, each), Key("nodes", node, POOL, each)),
    ):
        assert KEYS.parse(made) == parsed
        assert begin < made < end
    assert KEYS.parse(KEYS.placement(each)) == Key("placements", each)


def test_followed_range_has_all_but_the_placements() -> None:
    begin, end = KEYS.followed()
    for key in (KEYS.leader, KEYS.decommissioned("p"), KEYS.announce("n"), KEYS.request("n", "1")):
        assert begin <= key < end
    assert not begin <= KEYS.placement("v") < end


@pytest.mark.parametrize("key", [b"/crust/nodes/n", b"/crust/x/y", b"/other", b"/crust/\xff"])
def test_foreign_key_is_none_of_ours(key: bytes) -> None:
    assert KEYS.parse(key) is None


def test_values_are_read_as_they_were_written() -> None:
    said = announcement("n1", extra={"a": "b"})
    written = records.AnnouncementRecord.of(said).encoded()
    assert records.decode(records.AnnouncementRecord, b"k", written).announcement() == said
    asked = Request("1", "/m", bytes(range(256)), 1.5, "p")
    written = records.RequestRecord.of(asked).encoded()
    delivered = records.decode(records.RequestRecord, b"k", written).request("1", 7)
    assert delivered == asked
    assert delivered.delivery == 7


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"\xff", b'{"version":2}', b'{"version":1,"code":17}', b"[" * 100_000],
)
def test_value_that_is_none_of_ours_is_an_error_of_ours(value: bytes) -> None:
    with pytest.raises(records.StoreValueInvalid):
        records.decode(records.AnswerRecord, b"k", value)


def put(key: bytes, value: bytes, revision: int) -> pb.Event:
    """An event of a key that was made at `revision`."""
    kv = pb.KeyValue(key=key, value=value, create_revision=revision, mod_revision=revision)
    return pb.Event(type=pb.Event.PUT, kv=kv)


def deleted(key: bytes, revision: int) -> pb.Event:
    """An event of a key that was deleted."""
    return pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=revision))


def mirror() -> tuple[Mirror, list[tuple[RequestKey, Answer]]]:
    """A mirror, and the answers that it reports."""
    answers: list[tuple[RequestKey, Answer]] = []
    return Mirror(KEYS, lambda asking, answer: answers.append((asking, answer))), answers


def said(node: str, pool: str, revision: int) -> list[pb.Event]:
    """The events of a node's first announcement."""
    value = records.AnnouncementRecord.of(announcement(node, pool)).encoded()
    return [put(KEYS.announce(node), value, revision), put(KEYS.pool(node, pool), b"", revision)]


def test_value_that_is_no_announcement_is_left_out_and_others_are_read() -> None:
    seen, _ = mirror()
    seen.see(Changes([*said("n1", "a", 1), put(KEYS.announce("n2"), b"junk", 2)]))
    assert set(seen.nodes) == {"n1"}
    seen.see(Changes([put(KEYS.announce("n1"), b"junk", 3)]))
    assert seen.nodes == {}


def test_listing_replaces_all_that_was_known() -> None:
    seen, _ = mirror()
    seen.see(Changes([*said("n1", "a", 50), put(KEYS.leader, b"", 51)]))
    seen.see(
        Changes([put(KEYS.request("n1", "1"), b"", 52), put(KEYS.decommissioned("z"), b"", 53)])
    )
    assert (seen.revision, seen.leader, seen.open) == (53, 51, (RequestKey("n1", "1"),))
    seen.see(Listing(2, [each.kv for each in said("n2", "a", 2)]))
    assert (seen.revision, seen.leader, seen.open) == (2, 0, ())
    assert (seen.pools, set(seen.nodes), seen.retired) == ({"a": "n2"}, {"n2"}, frozenset())


def test_pool_is_of_the_node_that_began_to_announce_it_last() -> None:
    seen, _ = mirror()
    seen.see(Changes([*said("n1", "a", 1), *said("n2", "a", 2)]))
    assert (seen.pools, set(seen.nodes)) == ({"a": "n2"}, {"n1", "n2"})
    seen.see(Changes([deleted(KEYS.announce("n2"), 3), deleted(KEYS.pool("n2", "a"), 3)]))
    assert (seen.pools, set(seen.nodes)) == ({"a": "n1"}, {"n1"})
    seen.see(Changes([deleted(KEYS.pool("n1", "a"), 4)]))
    assert seen.pools == {}


def test_answer_that_replaces_its_request_stays_open_until_it_is_deleted() -> None:
    seen, answers = mirror()
    asked, answered = KEYS.request("n1", "1"), KEYS.answer("n1", "1")
    seen.see(Changes([put(asked, b"", 1)]))
    written = records.AnswerRecord(code=0, response=b"r").encoded()
    seen.see(Changes([put(answered, written, 2), deleted(asked, 2)]))
    assert seen.open == (RequestKey("n1", "1"),)
    assert answers == [(RequestKey("n1", "1"), Answer(0, "", b"r"))]
    seen.see(Changes([deleted(answered, 3)]))
    assert list(seen.open) == []


def test_answer_that_cannot_be_read_is_answered_all_the_same() -> None:
    seen, answers = mirror()
    seen.see(Changes([put(KEYS.answer("n1", "1"), b"junk", 1)]))
    ((_, answer),) = answers
    assert answer.code == 13


def test_certificate_is_judged_by_date_purpose_user_key_and_authority(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    now = datetime.now(UTC)

    def problems(**changed: object) -> tuple[str, ...]:
        return certificates.read(authority.files("x", authority.issue(**changed))).problems(now)  # type: ignore[arg-type]

    assert problems(user="n1") == ()
    assert "expired" in problems(user="n1", begins=-2 * DAY, ends=-DAY)[0]
    assert "is valid from" in problems(user="n1", begins=DAY)[0]
    assert "clientAuth" in problems(user="n1", has_usage=False)[0]
    assert "no common name" in problems(user="")[0]
    pair = authority.issue("n1")
    mixed = dataclasses.replace(pair, key=authority.issue("n1").key)
    assert certificates.read(authority.files("x", mixed)).problems(now) == (
        certificates.KEY_DIFFERS,
    )
    foreign = certificates.read(authority.files("x", other.issue("n1")))
    assert "not signed by an authority" in foreign.problems(now)[0]


def test_certificate_warns_two_weeks_before_its_end(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    found = certificates.read(authority.files("x", authority.issue("n1", ends=20 * DAY)))
    now = datetime.now(UTC)
    assert not found.expires_soon(now)
    assert found.expires_soon(now + timedelta(days=7))


def test_key_that_cannot_be_read_is_not_quoted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("x", authority.issue("n1"))
    Path(files.key).write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    with pytest.raises(failures.StoreCertificateRefused) as refused:
        certificates.read(files)
    shown = "".join(traceback.format_exception(refused.value))
    assert "c2VjcmV0" not in shown
    assert files.key in shown
