"""ttrpc: messages are whole wherever a frame ends, and what cannot be read is refused."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from crust.kata import mux, ttrpc


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=3000))), st.integers(1, 999)
)
def test_messages_are_the_same_wherever_a_frame_ends(
    sent: list[tuple[int, bytes]], size: int
) -> None:
    stream = b"".join(struct.pack(">IIBB", len(data), at, 1, 0) + data for at, data in sent)
    decoder = ttrpc.decoder()
    got = [
        frame
        for at in range(0, len(stream), size)
        for frame in decoder.feed(stream[at : at + size])
    ]
    assert [(frame.stream, frame.data) for frame in got] == sent


@given(st.binary(max_size=300))
def test_a_call_that_cannot_be_read_is_a_violation(data: bytes) -> None:
    frame = ttrpc.Frame(1, ttrpc.REQUEST, data)
    for parse in (ttrpc.parse_request, ttrpc.parse_response):
        try:
            parse(frame)
        except mux.ProtocolViolated:
            continue


def test_a_long_refusal_is_cut() -> None:
    answer = ttrpc.response(3, ttrpc.Failure(ttrpc.UNKNOWN, "x" * 100_000))
    (frame,) = ttrpc.decoder().feed(answer)
    failure = ttrpc.parse_response(frame)
    assert isinstance(failure, ttrpc.Failure)
    assert (failure.code, len(failure.text)) == (2, 3000)
