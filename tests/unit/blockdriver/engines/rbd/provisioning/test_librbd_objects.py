"""The header of an image, as the cluster's object classes answer it."""

from typing import cast

import pytest

from crust.blockdriver.ceph.binding import Ioctx
from crust.blockdriver.engines.rbd.provisioning.librbd_objects import (
    ObjectMap,
    has_snapshots,
    read_header,
    read_object_map,
)
from tests.support.raised import raised

ID = b"\x02\x00\x00\x00ab"
SIZE = b"\x16" + (1 << 20).to_bytes(8, "little")
VALUE = b"\x01\x00\x00\x00v"


class Objects:
    """What the cluster answers, by method."""

    def __init__(self, **answers: bytes) -> None:
        self._answers = {"get_id": ID, "get_size": SIZE, "metadata_get": VALUE, **answers}
        self.asked: list[tuple[str, str]] = []

    def execute(
        self, name: str, cls: str, method: str, data: bytes, length: int
    ) -> tuple[int, bytes]:
        """A method of an object class."""
        assert cls == "rbd"
        self.asked.append((name, method))
        return 0, self._answers[method]


def test_header_is_that_of_the_id_of_the_name() -> None:
    objects = Objects()
    assert read_header(cast("Ioctx", objects), "v-1", "key") == (1 << 20, "v")
    assert [name for name, _ in objects.asked] == ["rbd_id.v-1", "rbd_header.ab", "rbd_header.ab"]


@pytest.mark.parametrize("method", ["get_id", "get_size", "metadata_get"])
@pytest.mark.parametrize(
    "answer", [b"", b"\xff", b"\x09\x00\x00\x00ab", b"\x02\x00\x00\x00\xff\xff"]
)
def test_another_form_is_refused_by_name(method: str, answer: bytes) -> None:
    with raised("HeaderUnreadable", match="v-1"):
        read_header(cast("Ioctx", Objects(**{method: answer})), "v-1", "key")


def object_map(states: str) -> bytes:
    """The answer for objects with these states, a figure each."""
    objects = len(states).to_bytes(8, "little")
    bits = int("0" + states.ljust(-(-len(states) // 4) * 4, "0"), 4)
    data = bits.to_bytes(-(-len(states) // 4))
    return b"\x0e\0\0\0\x01\x01\x08\0\0\0" + objects + data + bytes(4)


def read(states: str) -> ObjectMap:
    objects = Objects(object_map_load=object_map(states))
    found = read_object_map(cast("Ioctx", objects), "ab", 5, len(states))
    assert objects.asked == [("rbd_object_map.ab.0000000000000005", "object_map_load")]
    return found


@pytest.mark.parametrize(
    ("states", "written"), [("", 0), ("0", 0), ("1", 1), ("2", 1), ("3", 0), ("0123" * 9 + "1", 19)]
)
def test_written_objects_are_the_dirty_and_the_pending_ones(states: str, written: int) -> None:
    assert read(states).written() == written


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [("1333", "3333", 0), ("1333", "0123", 3), ("000", "111", 0), ("31", "3333311", 0), ("13331", "11113", 4)],
)  # fmt: skip
def test_objects_are_replaced_unless_the_next_map_has_them_clean(
    old: str, new: str, replaced: int
) -> None:
    """Where the image has grown since, the older map is shorter."""
    assert read(old).replaced_in(read(new)) == replaced


@pytest.mark.parametrize("answer", [b"", object_map("0123")[:14], object_map("0123" * 9)[:20]])
def test_cut_object_map_is_refused_by_name(answer: bytes) -> None:
    with raised("HeaderUnreadable", match="ab"):
        read_object_map(cast("Ioctx", Objects(object_map_load=answer)), "ab", None, 36)


def test_snapshots_are_those_of_the_header() -> None:
    numbers = {0: False, 2: True}
    for count, expected in numbers.items():
        answer = bytes(8) + count.to_bytes(4, "little") + bytes(8 * count)
        assert has_snapshots(cast("Ioctx", Objects(get_snapcontext=answer)), "ab") is expected
    with raised("HeaderUnreadable", match="ab"):
        has_snapshots(cast("Ioctx", Objects(get_snapcontext=b"")), "ab")
