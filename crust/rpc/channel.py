"""Channels to peers on this host: one per peer, kept for the life of the process.

A new channel costs as much as several calls, so rooms are given one and keep it. A peer that restarts is found
again within a fraction of a second: gRPC's own back-off starts at a second and grows to minutes, which on a
unix socket serves nobody.
"""

import grpc
import grpc.aio

from crust import errors

SOCKET_PATH_MAX_BYTES = 107
"""sun_path of unix(7), less the final NUL."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Whatever its name says, this is how long one attempt may take: on a busy machine a peer that has been listening
    # for long needs a while to greet, and 50 ms here made calls fail that only had to wait.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class SocketPathTooLong(errors.InvalidRequest):
    """unix(7) allows 107 bytes."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the socket path {path!r} cannot be used",
            why=f"it has {len(path.encode())} bytes, the system allows {SOCKET_PATH_MAX_BYTES}",
            hint="choose a shorter directory",
        )


def target_of(socket_path: str) -> str:
    """gRPC's name for a unix socket; raises `SocketPathTooLong`, `InvalidRequest`."""
    if not socket_path.startswith("/"):
        raise errors.InvalidRequest(
            f"the socket path {socket_path!r} cannot be used",
            why="it is not absolute",
            hint="give the full path of the socket, without 'unix://'",
        )
    if len(socket_path.encode()) > SOCKET_PATH_MAX_BYTES:
        raise SocketPathTooLong(socket_path)
    return f"unix:{socket_path}"


def connect(socket_path: str) -> grpc.aio.Channel:
    """A channel to the server on `socket_path`; connects when first used. The caller closes it.

    Raises `SocketPathTooLong` and `InvalidRequest` for a path that cannot be one.
    """
    options = [*OPTIONS, ("grpc.default_authority", "localhost")]
    return grpc.aio.insecure_channel(target_of(socket_path), options=options)
