"""The port to a part of this process: a call of its service, with nothing between."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc

from crust.core import errors, logs
from crust.rpc.call import Call
from crust.rpc.port import Port
from crust.rpc.serving.service import Service
from crust.rpc.status import TIMED_OUT, PeerStatus


class LocalPort(Port):
    """The end within the process: a method runs in its caller's task. `service` has the part, while it serves."""

    def __init__(self, service: Callable[[], Service | None]) -> None:
        self._service = service

    @property
    def connection(self) -> int:
        return 1

    def is_connected(self) -> bool:
        return True

    async def answer(self, call: Call, data: bytes) -> bytes:
        try:
            async with asyncio.timeout(call.time_remaining()):
                return await self._part(call.method).answer(call, data, is_inner=True)
        except TimeoutError:
            raise PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, TIMED_OUT) from None

    async def forward(self, call: Call, data: bytes) -> bytes:
        """See `Port`. The caller's own deadline holds."""
        return await self._part(call.method).answer(call, data, is_inner=True)

    async def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        """See `Port`. The method runs only while its reader waits for an answer; both keep fields of their own."""
        answers = self._part(call.method).stream(call, data, is_inner=True)
        fields = logs.context.get()
        async with contextlib.aclosing(answers):
            while True:
                outer = logs.context.get()
                logs.context.set(fields)
                try:
                    async with asyncio.timeout(call.time_remaining()):
                        answer = await anext(answers, None)
                except TimeoutError:
                    raise PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, TIMED_OUT) from None
                finally:
                    fields = logs.context.get()
                    logs.context.set(outer)
                if answer is None:
                    return
                yield answer

    async def aclose(self) -> None:
        """Nothing to do."""

    def _part(self, method: str) -> Service:
        service = self._service()
        if service is None:
            raise PeerStatus.of(
                errors.PeerUnavailable.named(
                    "NotServedYet",
                    f"{method.rpartition('/')[2]} cannot be answered",
                    why="the part of this process that answers it does not run",
                )
            )
        return service
