"""Bare gRPC channels over unix sockets, and their options. Code of crust calls through a `port`, which has one.

A bare channel is for programs that act as a CO, a kubelet or a conformance suite: they must see gRPC unchanged.
"""

import grpc
import grpc.aio

from crust.core import errors, volumes

SOCKET_PATH_MAX_BYTES = 107
"""sun_path of unix(7), less the final NUL."""

MESSAGE_MAX_BYTES = 64 << 20
"""Of an answer, such as a list of a hundred thousand volumes."""

REQUEST_MAX_BYTES = 4 << 20
"""gRPC's default: no request of CSI or of crust comes near it, and a server keeps many requests in memory at once."""

STREAMS_MAX = 1000
"""The calls of one connection at a time: the proxy has one connection to a driver for all volumes of a node."""

CONNECTIONS_MAX = 1000
"""Of one socket, each a descriptor of the process: a kubelet opens one for each call, a sidecar has one."""

PREFACE_MS = 20_000
"""Until a new connection has said that it speaks HTTP/2; every client says so at once."""

PING_MS = 60_000
"""A quiet connection is asked this often whether its peer lives, which has as long to answer."""

HANDLER_ANSWER_MAX_BYTES = 256 << 10
"""Of a runtime handler, through which a guest speaks: statistics, a condition."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    # A status travels as metadata, of which gRPC takes 8 KiB: a longer error text, such as the output of mkfs, would
    # become RESOURCE_EXHAUSTED. 64 KiB of text take three times as much, escaped, and as much again in the details.
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.absolute_max_metadata_size", 1 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # In spite of its name this is the time limit of one connection attempt. On a busy machine a running server may
    # need a while to accept; with 50 ms here calls failed although they only had to wait.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = tuple(
    {
        **dict(OPTIONS),
        "grpc.max_receive_message_length": REQUEST_MAX_BYTES,
        # With a limit gRPC also delays a peer that opens and resets streams. Without one it sheds load, and cancels
        # calls of other connections.
        "grpc.max_concurrent_streams": STREAMS_MAX,
        "grpc.max_allowed_incoming_connections": CONNECTIONS_MAX,
        "grpc.server_handshake_timeout_ms": PREFACE_MS,
        # A peer that answers pings keeps a connection without calls (no grpc.max_connection_idle_ms): a sidecar
        # of Kubernetes (csi-lib-utils) ends when it loses its connection.
        "grpc.keepalive_time_ms": PING_MS,
        "grpc.http2.ping_timeout_ms": PING_MS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.so_reuseport": 0,
    }.items()
)


def target_of(socket_path: str) -> str:
    """gRPC's name for a unix socket; raises `SocketPathTooLong`, `InvalidRequest`."""
    what, size_bytes = f"the socket path {socket_path!r} cannot be used", len(socket_path.encode())
    if not socket_path.startswith("/"):
        hint = "give the full path of the socket, without 'unix://'"
        raise errors.InvalidRequest(what, why="it is not absolute", hint=hint)
    if volumes.CONTROL.search(socket_path):  # gRPC would end the path at a NUL
        why = "it holds a control character"
        raise errors.InvalidRequest(what, why=why, hint="choose another path")
    if size_bytes > SOCKET_PATH_MAX_BYTES:
        why = f"it has {size_bytes} bytes, the system allows {SOCKET_PATH_MAX_BYTES}"
        hint = "choose a shorter directory"
        raise errors.InvalidRequest.named("SocketPathTooLong", what, why=why, hint=hint)
    return f"unix:{socket_path}"


def connect(socket_path: str, *, answer_max_bytes: int = MESSAGE_MAX_BYTES) -> grpc.aio.Channel:
    """A channel to the server on `socket_path`; it connects at the first call. The caller closes it.

    A message of more than `answer_max_bytes` is refused with RESOURCE_EXHAUSTED. Raises `SocketPathTooLong`, and
    `InvalidRequest` for a path that is not absolute.
    """
    options = {
        **dict(OPTIONS),
        "grpc.max_receive_message_length": answer_max_bytes,
        "grpc.default_authority": "localhost",
    }
    return grpc.aio.insecure_channel(target_of(socket_path), options=list(options.items()))
