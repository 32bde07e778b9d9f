"""Calls to etcd: each has a deadline, goes to the next member if one fails, and may therefore be made twice.

A call is tried at one member for a few seconds, then at the next, around and around until its time is over: a member
that hangs, or is cut off with its node, costs one attempt, and then another member is preferred. Every call says
`hasleader`, so that a member without a leader refuses at once instead of being silent.

Whether a call that failed has changed something is unknown, and it may still do so: a member that was stopped carries
out what it had received, long after another one has answered. So only what may be made twice, and late, is sent:
reads, leases (one too many expires), and transactions that compare first (`writes`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from crust.cluster.etcd.client import certificates, failures
from crust.cluster.etcd.client.channels import Channels, Member
from crust.cluster.etcd.client.failures import Failure, Next
from crust.cluster.etcd.client.history import History
from crust.cluster.etcd.client.methods import RANGE, TXN, Method
from crust.cluster.protocol import StoreUnavailable

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

CALL_S = 10.0
"""For a call with all its attempts: an election takes two to four seconds."""
ATTEMPT_S = 3.0
_PAUSE_S = 0.2
"""Between two rounds, for members that refuse at once."""
_METADATA = (("hasleader", "true"),)
_LINEARIZABLE = (RANGE.response, TXN.response)
"""Answers that have the revision of all writes before the request, whichever member gives them."""


class Broken(Exception):
    """An attempt has failed: a call at one member, or a stream has ended or is silent."""

    def __init__(self, member: Member, found: Failure) -> None:
        super().__init__(f"{member.address}: {found.why}")
        self.member = member
        self.failure = found


class Client:
    """The members as one server."""

    def __init__(self, channels: Channels, *, attempt_s: float = ATTEMPT_S) -> None:
        self._channels = channels
        self._attempt_s = attempt_s
        self._preferred = 0
        self.history = History()

    @property
    def user(self) -> str:
        """The certificate's user; empty as long as none could be read."""
        return self._channels.identity.user if self._channels.identity else ""

    def refused(self, what: str) -> failures.StoreCertificateRefused | None:
        """Why no new connection can be made, though those that there are go on: any call may need one."""
        identity = self._channels.identity
        found = identity.out_of_date(certificates.now()) if identity else ()
        return failures.StoreCertificateRefused(what, "; ".join(found)) if found else None

    async def call(
        self,
        method: Method[Q, R],
        request: Q,
        timeout_s: float = CALL_S,
        *,
        what: str,
        in_doubt: Callable[[], None] = lambda: None,
    ) -> R:
        """Make the call, perhaps more than once. `what` failed, for the error.

        `in_doubt` is called for each attempt that had no answer: etcd may carry it out, at any time from now on.

        Raises `StoreUnavailable`, and `LeaseGone` for a call that names a lease that is not there.
        """
        until = time.monotonic() + timeout_s
        found: dict[str, Failure] = {}
        while (left := until - time.monotonic()) > 0:
            member = self._member(what)
            tried_before = member.address in found
            try:
                return await self.attempt(member, method, request, min(left, self._attempt_s))
            except BaseException as failed:
                in_doubt()
                if not isinstance(failed, Broken):
                    raise
                found[member.address] = failed.failure
            following = found[member.address].next
            if following is Next.NEVER or self._is_refused_by_all(found):
                break
            if following is Next.ELSEWHERE:
                self.avoid(member)
            if tried_before:
                await asyncio.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))
        raise failures.unavailable(what, found)

    @contextlib.asynccontextmanager
    async def stream(self, method: Method[Q, R], *, what: str) -> AsyncIterator["Stream[Q, R]"]:
        """A stream to the preferred member, which is cancelled at the end of the block. Raises `StoreUnavailable`."""
        member = self._member(what)
        begin = member.streams.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            call = begin(metadata=_METADATA)
        except grpc.aio.UsageError:  # the channel was replaced at this moment
            raise StoreUnavailable(what, "the certificates were being replaced") from None
        try:
            yield Stream(self, member, call)
        finally:
            call.cancel()

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them; none as long as no certificate could be read."""
        return self._channels.members

    def avoid(self, member: Member) -> None:
        """Prefer the next member, if this is the preferred one."""
        members = self._channels.members
        if members and members[self._preferred % len(members)] is member:
            self._preferred = (self._preferred + 1) % len(members)

    def explained(self, error: grpc.aio.AioRpcError) -> Failure:
        """What the error means; where a member refuses our certificate, what is seen in it. Raises `LeaseGone`."""
        found = failures.failure(error)
        identity = self._channels.identity
        if found.kind is failures.StoreCertificateRefused and identity:
            problems = identity.problems(certificates.now())
            why = "; ".join((found.why, *problems))
            return Failure(found.kind, why, found.hint, found.next)
        if found.kind is failures.StoreAccessDenied:
            why = f"{found.why}: {self.user or 'the certificate names none'}"
            return Failure(found.kind, why, found.hint, found.next)
        return found

    def _member(self, what: str) -> Member:
        members = self._channels.members
        if not members:
            problem = self._channels.problem or StoreUnavailable(what, "it is not connected")
            raise type(problem)(what, problem.why, problem.hint)
        return members[self._preferred % len(members)]

    def _is_refused_by_all(self, found: dict[str, Failure]) -> bool:
        """A certificate does not become better by waiting; one member alone may have an old list of authorities."""
        refused = all(each.kind is failures.StoreCertificateRefused for each in found.values())
        return refused and len(found) >= len(self._channels.members)

    async def attempt(
        self, member: Member, method: Method[Q, R], request: Q, timeout_s: float
    ) -> R:
        """Ask one member once. Raises `Broken`, and `LeaseGone`."""
        begin = member.calls.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        sent_at = self.history.position
        try:
            answer: R = await begin(request, timeout=timeout_s, metadata=_METADATA)
        except grpc.aio.AioRpcError as error:
            raise Broken(member, self.explained(error)) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            raise_if_cancelled()
            raise Broken(member, _REPLACED) from None
        if isinstance(answer, _LINEARIZABLE):
            self.history.seen(answer.header, sent_at)
        return answer


class Stream(Generic[Q, R]):
    """A stream in both directions. Each step has a time limit; whatever ends it is `Broken`."""

    def __init__(self, client: Client, member: Member, call: Any) -> None:
        self._client = client
        self._member = member
        self._call = call

    async def write(self, request: Q, timeout_s: float) -> None:
        """Send. Raises `Broken`."""
        await self._step(self._call.write(request), timeout_s)

    async def read(self, timeout_s: float) -> R:
        """Receive. Raises `Broken`, also if nothing comes, and `LeaseGone`."""
        answer = await self._step(self._call.read(), timeout_s)
        if answer is grpc.aio.EOF:
            raise await self._ended()
        return answer  # type: ignore[no-any-return]  # of the deserializer

    async def _step(self, step: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await step
        except TimeoutError:
            raise self._broken(_SILENT) from None
        except grpc.aio.AioRpcError as error:
            raise self._broken(self._client.explained(error)) from None
        except asyncio.InvalidStateError:  # a write on a call that has ended: its status says why
            raise await self._ended() from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            raise_if_cancelled()
            raise self._broken(_REPLACED) from None

    async def _ended(self) -> Broken:
        error = grpc.aio.AioRpcError(
            await self._call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await self._call.details()
        )  # fmt: skip
        return self._broken(self._client.explained(error))

    def _broken(self, found: Failure) -> Broken:
        if found is not _REPLACED:
            self._client.avoid(self._member)
        return Broken(self._member, found)


_SILENT = Failure(
    StoreUnavailable, "the member is silent", "see whether etcd hangs", Next.ELSEWHERE
)
_REPLACED = Failure(StoreUnavailable, "the certificates were replaced", "", Next.HERE)


def raise_if_cancelled() -> None:
    """Inside of `except CancelledError`: go on with it if this task was cancelled.

    The reader of a channel that is closed gets the same exception, and nobody has cancelled its task.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
