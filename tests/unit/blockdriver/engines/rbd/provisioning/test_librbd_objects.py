"""The header of an image, as the cluster's object classes answer it."""

from typing import cast

import pytest

from crust.blockdriver.ceph.binding import Ioctx
from crust.blockdriver.engines.rbd.provisioning.librbd_objects import Header, read_header
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
