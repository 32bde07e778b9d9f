"""The bytes below NRI: the measured frames and messages, every way of cutting them, and hostile ones."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.kata import ttrpc
from crust.wire.nri.v1alpha1 import nri_pb2

REGISTER = bytes.fromhex(
    # connection 2, 69 bytes; length 59, stream 1, request
    "0000000200000045" "0000003b000000010100"
    # service, method, payload {"crust", "99"}
    "0a1c6e72692e706b672e6170692e7631616c706861312e52756e74696d65"
    "120e5265676973746572506c7567696e"
    "1a0b0a0563727573741202" "3939"
)  # fmt: skip
"""The plugin's first frame; containerd 2.1, 2.2 and 2.4 take it."""


def test_registration_has_the_bytes_that_containerd_takes() -> None:
    message = nri_pb2.RegisterPluginRequest(plugin_name="crust", plugin_idx="99")
    call = ttrpc.request(1, "nri.pkg.api.v1alpha1.Runtime", "RegisterPlugin", message)
    assert ttrpc.frames_of(ttrpc.PLUGIN_CALLS, call).hex() == REGISTER.hex()


def test_no_frame_carries_more_than_the_engine_takes() -> None:
    data = bytes(range(256)) * 40
    sent = ttrpc.frames_of(ttrpc.ENGINE_CALLS, data)
    frames = ttrpc.frame_splitter().feed(sent)
    assert all(len(payload) <= 4096 for _, payload in frames)
    assert b"".join(payload for _, payload in frames) == data


@given(st.lists(st.tuples(st.integers(1, 2), st.binary(max_size=9000))), st.integers(1, 5000))
def test_frames_are_the_same_wherever_the_socket_cuts_them(
    sent: list[tuple[int, bytes]], size: int
) -> None:
    stream = b"".join(ttrpc.frames_of(connection, data) for connection, data in sent)
    decoder = ttrpc.frame_splitter()
    got: dict[int, bytes] = {1: b"", 2: b""}
    for at in range(0, len(stream), size):
        for connection, payload in decoder.feed(stream[at : at + size]):
            got[connection] += payload
    for connection in got:
        assert got[connection] == b"".join(data for to, data in sent if to == connection)


@given(st.lists(st.binary(max_size=200)))
def test_hostile_bytes_end_the_connection_and_nothing_else(parts: list[bytes]) -> None:
    for decoder in (ttrpc.frame_splitter(), ttrpc.message_splitter()):
        try:
            for part in parts:
                decoder.feed(part)
        except ttrpc.ProtocolViolated:
            continue


@pytest.mark.parametrize(
    "decoder", [ttrpc.frame_splitter(), ttrpc.message_splitter()], ids=["mux", "ttrpc"]
)
def test_a_length_is_refused_before_anything_is_kept_for_it(
    decoder: ttrpc.Splitter[object],
) -> None:
    with pytest.raises(ttrpc.ProtocolViolated):
        decoder.feed(b"\xff" * 10)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=3000))), st.integers(1, 999)
)
def test_messages_are_the_same_wherever_a_frame_ends(
    sent: list[tuple[int, bytes]], size: int
) -> None:
    stream = b"".join(struct.pack(">IIBB", len(data), at, 1, 0) + data for at, data in sent)
    decoder = ttrpc.message_splitter()
    got = [
        frame
        for at in range(0, len(stream), size)
        for frame in decoder.feed(stream[at : at + size])
    ]
    assert [(frame.stream, frame.data) for frame in got] == sent


@given(st.binary(max_size=300))
def test_a_call_that_cannot_be_read_is_a_violation(data: bytes) -> None:
    frame = ttrpc.CallMessage(1, ttrpc.REQUEST, data)
    for parse in (ttrpc.parse_request, ttrpc.parse_response):
        try:
            parse(frame)
        except ttrpc.ProtocolViolated:
            continue


def test_a_long_refusal_is_cut() -> None:
    answer = ttrpc.response(3, ttrpc.Failure(ttrpc.UNKNOWN, "x" * 100_000))
    (frame,) = ttrpc.message_splitter().feed(answer)
    failure = ttrpc.parse_response(frame)
    assert isinstance(failure, ttrpc.Failure)
    assert (failure.code, len(failure.text)) == (2, 3000)
