"""One request of the controller, carried out at a node: checked, called in this process, answered.

Only the controller's services are reached from here, for the pool that is here: whoever can write this node's
requests can do what the controller can do with this pool, and no more. A request that nobody waits for any more is
not carried out.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from crust import errors
from crust.cluster.methods import METHODS, NAMES_UNDER_WAY, Method
from crust.cluster.protocol import Answer, Request
from crust.rpc import status
from crust.rpc.in_process.local import LocalServer
from crust.rpc.messages import call_fields, extensions

CLOCKS_APART_S = 30.0
"""How far the clocks of nodes may be apart before a request is dropped that somebody waits for."""
ANSWER_MAX_BYTES = 1024 * 1024
"""etcd takes 1.5 MiB with all that is around it."""

_log = logging.getLogger(__name__)


class MethodNotForNodes(errors.Unsupported):
    """A controller asked a node for a method that nodes do not carry out."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method[:128]} is not carried out",
            why="a node serves its controller the calls of CSI's Controller services alone",
            hint="run the same version of crust at the controller and at the nodes",
        )


class PoolNotOnNode(errors.PeerUnavailable):
    """A request is for another pool than the node has now."""

    def __init__(self, wanted: str, here: str) -> None:
        super().__init__(
            f"the pool {wanted[:64]} is not served",
            why=f"this node has {f'the pool {here}' if here else 'no pool'} now",
            hint="mount the disk of that pool at its node",
        )


class RequestExpired(errors.PeerUnavailable):
    """Nobody waits for a request any more."""

    def __init__(self) -> None:
        super().__init__("the request was not carried out", why="nobody waits for it any more")


class RequestUnreadable(errors.InvalidRequest):
    """The message of a request cannot be decoded."""

    def __init__(self, method: str) -> None:
        super().__init__(f"the request for {method} is unreadable", why="it is no such message")


class AnswerTooLarge(errors.RuntimeFailed):
    """The answer to a request does not fit into the store."""

    def __init__(self, method: str, size_bytes: int) -> None:
        super().__init__(
            f"{method} cannot be answered",
            why=f"the answer has {size_bytes} bytes, and the store takes {ANSWER_MAX_BYTES}",
            hint="ask for less at once",
        )


class RequestFailedUnexpectedly(errors.RuntimeFailed):
    """Carrying a request out failed in a way nobody expected."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method[:128]} failed at the node",
            why="it met a fault of crust",
            hint="report what the node's log says",
        )


class NodeCalls:
    """Carries requests out at `server`.

    `names_under_way` are those that requests which are here may still create.
    """

    def __init__(
        self,
        server: LocalServer,
        pool_id: Callable[[], str],
        names_under_way: Callable[[], struct_pb2.ListValue],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._channel = server.channel()
        self._pool_id = pool_id
        self._names_under_way = names_under_way
        self._clock = clock

    async def carry_out(self, request: Request) -> Answer:
        """Check and call; every failure becomes its answer."""
        started_s = time.monotonic()
        try:
            answer = await self._called(self._admitted(request), request)
        except errors.CrustError as error:
            answer = answer_of(error)
        except grpc.aio.AioRpcError as error:
            answer = _answer_of_status(error)
        except Exception:  # without an answer no later request about this volume would begin
            _log.exception("a request failed")
            answer = answer_of(RequestFailedUnexpectedly(request.method))
        fields = {
            "rpc": request.method.rpartition("/")[2],
            "request_id": request.request_id,
            "code": answer.code,
            "ms": round((time.monotonic() - started_s) * 1000, 1),
        }
        _log.info("carried out for the controller", extra=fields)
        return answer

    def _admitted(self, request: Request) -> Method:
        method = METHODS.get(request.method)
        if method is None:
            raise MethodNotForNodes(request.method)
        if 0 < request.deadline_unix_s < self._clock() - CLOCKS_APART_S:
            raise RequestExpired()
        if request.pool_id != self._pool_id():
            raise PoolNotOnNode(request.pool_id, self._pool_id())
        try:
            method.request.FromString(request.message)
        except DecodeError as error:
            raise RequestUnreadable(method.name) from error
        return method

    async def _called(self, method: Method, request: Request) -> Answer:
        metadata = (
            (call_fields.ID_KEY, request.request_id),
            (extensions.KEY, extensions.ERROR_INFO),
        )
        if method is NAMES_UNDER_WAY:
            return Answer(0, "", self._names_under_way().SerializeToString())
        if method.is_stream:
            return await self._first_of_stream(method, request, metadata)
        call: Any = self._channel.unary_unary(method.path)
        response: bytes = await call(request.message, metadata=metadata)
        if len(response) > ANSWER_MAX_BYTES:
            raise AnswerTooLarge(method.name, len(response))
        return Answer(0, "", response)

    async def _first_of_stream(
        self, method: Method, request: Request, metadata: tuple[tuple[str, str], ...]
    ) -> Answer:
        """The first message of a stream; empty if it has none. The controller asks again from its end on."""
        call: Any = self._channel.unary_stream(method.path)
        stream = call(request.message, metadata=metadata)
        async for each in stream:
            stream.cancel()
            return Answer(0, "", each)
        return Answer(0)


def answer_of(error: errors.CrustError) -> Answer:
    """The error as an answer."""
    message = error.shown()
    return Answer(status.code_of(error).value[0], message, status.details_of(error, message))


def _answer_of_status(error: grpc.aio.AioRpcError) -> Answer:
    found = dict(error.trailing_metadata() or ())
    details = found.get(status.DETAILS_KEY, b"")
    assert isinstance(details, bytes), "the key says that it is bytes"
    return Answer(error.code().value[0], error.details() or "", details)
