"""The agent's protocol: framing, arguments and faults."""

import errno

import pytest

from examples.kata.guest.agent import protocol

_Args = protocol.Args


def test_lines_split_correctly_at_any_read_boundary() -> None:
    stream = b'{"a":1}\n\n{"b":2}\n'
    for size in range(1, len(stream) + 1):
        lines = protocol.Lines()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [line for piece in pieces for line in lines.feed(piece)] == [b'{"a":1}', b'{"b":2}']


def test_too_long_line_is_dropped_up_to_its_newline() -> None:
    lines = protocol.Lines()
    long = b"x" * (protocol.MAX_LINE + 1)
    for piece in (long[:1000], long, b"more"):
        assert list(lines.feed(piece)) == []
    assert list(lines.feed(b"end\nnext\n")) == [None, b"next"]
    assert list(lines.feed(long + b"\nnext\n")) == [None, b"next"]


def test_reset_drops_a_partial_line() -> None:
    lines = protocol.Lines()
    assert list(lines.feed(b'{"id":"ha')) == []
    lines.reset()
    assert list(lines.feed(b"{}\n")) == [b"{}"]


def test_encode_of_too_long_answer_becomes_an_error() -> None:
    line = protocol.encode({"id": "7", "ok": {"x": "y" * protocol.MAX_LINE}})
    assert len(line) < 200
    assert b'"id":"7"' in line
    assert b"exhausted" in line


@pytest.mark.parametrize(
    "values",
    [
        {"volume": "../x"},
        {"volume": ""},
        {"volume": "a" * 21},
        {"volume": "-x"},
        {"volume": "a\n"},
        {"volume": 3},
        {"volume": None},
        {},
        {"volume": "ok", "size": True},
        {"volume": "ok", "size": -1},
        {"volume": "ok", "size": 11},
        {"volume": "ok", "size": 1.0},
        {"volume": "ok", "size": 1, "surprise": 1},
    ],
)
def test_invalid_arguments_are_refused(values: dict[str, object]) -> None:
    def read() -> None:
        args = _Args(values)
        args.name("volume")
        args.integer("size", 0, 10)
        args.end()

    with pytest.raises(protocol.Fault) as caught:
        read()
    assert caught.value.code == "bad_request"


def test_fault_of_oserror_keeps_its_errno_name() -> None:
    fault = protocol.fault_of(OSError(errno.ENOSPC, "No space left", b"/x"), "growing")
    assert (fault.code, fault.message) == (
        "exhausted",
        "growing failed (/x): No space left [ENOSPC]",
    )
