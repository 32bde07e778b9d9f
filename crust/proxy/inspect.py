"""The API for operators: the current state of the proxy. Read-only."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from google.protobuf import timestamp_pb2

import crust
from crust.core import errors
from crust.handoff.entry import Entry
from crust.host import answers
from crust.host.process import processes, workers
from crust.proxy import handler_calls
from crust.proxy.handlers import Handlers
from crust.proxy.look import Reconciler
from crust.proxy.sockets import DriverSockets
from crust.proxy.table import Entries
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1
from crust.wire import pool
from crust.wire.v1 import inspect_pb2

_Timestamp = pool.class_of(timestamp_pb2.Timestamp)


@dataclass(frozen=True, slots=True)
class Inspect:
    """The service Inspect: handlers, the handoff directory, drivers, health."""

    entries: Entries
    drivers: DriverSockets
    handlers: Handlers
    reconciler: Reconciler

    async def ListDrivers(
        self, request: inspect_pb2.ListDriversRequest, call: Call
    ) -> inspect_pb2.ListDriversResponse:
        """The drivers that are served, and whether their backends answer."""
        states = self.entries.table.states()
        return inspect_pb2.ListDriversResponse(
            drivers=[
                inspect_pb2.ListDriversResponse.Driver(
                    name=driver.served.name,
                    socket=driver.served.socket,
                    backend=driver.served.backend,
                    connected=driver.backend.port.is_connected(),
                    deferred_volumes=sum(
                        number for (name, _), number in states.items() if name == driver.served.name
                    ),
                    registration=driver.registration.state if driver.registration else "",
                )
                for driver in self.drivers.all()
            ]
        )

    async def ListHandlers(
        self, request: inspect_pb2.ListHandlersRequest, call: Call
    ) -> inspect_pb2.ListHandlersResponse:
        """The registered handlers, and what each says is wrong."""
        handlers = self.handlers.all()
        messages = await asyncio.gather(*map(handler_calls.problems, handlers))
        return inspect_pb2.ListHandlersResponse(
            handlers=[
                inspect_pb2.ListHandlersResponse.Handler(
                    registration=crust_v1.registration_to_wire(handler),
                    registered_at=_timestamp(handler.registered_at_s),
                    message=message,
                )
                for handler, message in zip(handlers, messages, strict=True)
            ]
        )

    async def ListDeferredVolumes(
        self, request: inspect_pb2.ListDeferredVolumesRequest, call: Call
    ) -> inspect_pb2.ListDeferredVolumesResponse:
        """All entries of the handoff directory after a look; unreadable ones with the error. If no thread is free,
        the proxy answers with the entries of the last look.
        """
        with contextlib.suppress(workers.NoWorkerFree):
            await workers.check_free()
            await self.reconciler.look()
        entries = self.entries.table.entries()
        return inspect_pb2.ListDeferredVolumesResponse(volumes=map(_volume, entries))

    async def ExplainPolicy(
        self, request: inspect_pb2.ExplainPolicyRequest, call: Call
    ) -> inspect_pb2.ExplainPolicyResponse:
        """The decision for such a publish. Raises `NoSuchDriver` and the errors of the policy."""
        served = {driver.served.name: driver.frontend for driver in self.drivers.all()}
        if request.driver not in served:
            raise errors.NotFound.named(
                "NoSuchDriver",
                f"driver {request.driver[:63]!r} is not known",
                why=f"the proxy serves {', '.join(sorted(served)) or 'none'}",
            )
        decision = await served[request.driver].policy.decide(
            flag=request.defer_fs_ops, block=request.block, context=request.volume_context
        )
        return inspect_pb2.ExplainPolicyResponse(
            deferred=decision.defer, handler=decision.handler or "", decided_by=decision.decider
        )

    async def GetHealth(
        self, request: inspect_pb2.GetHealthRequest, call: Call
    ) -> inspect_pb2.GetHealthResponse:
        return inspect_pb2.GetHealthResponse(
            version=crust.__version__,
            conditions=[
                inspect_pb2.GetHealthResponse.Condition(
                    component=component, error_name=problem.error_name, message=str(problem)
                )
                for component, problem in self.entries.health.problems.items()
            ],
        )

    async def Watch(
        self, request: inspect_pb2.WatchRequest, call: Call
    ) -> AsyncIterator[inspect_pb2.Event]:
        async with self.entries.events.watch() as events:
            await call.begin()  # so that the client knows that the watch has begun
            async for event in events:
                yield inspect_pb2.Event(
                    time=_timestamp(event.time_s),
                    kind=event.kind,
                    target_path=event.target_path,
                    handler=event.handler,
                    message=event.message,
                )


def _volume(entry: Entry) -> inspect_pb2.DeferredVolume:
    if entry.record is None:
        return inspect_pb2.DeferredVolume(
            entry=entry.digest, state=entry.state, message=str(entry.error or "no record")
        )
    record = entry.record
    claim = entry.claim if entry.live else None
    return inspect_pb2.DeferredVolume(
        entry=entry.digest,
        target_path=record.target.text,
        driver=record.key.driver,
        volume_id=record.key.volume_id,
        handler=record.handler,
        device=record.shown_source,
        fs_type=record.mount.fs_type,
        readonly=record.readonly,
        capacity_bytes=record.mount.capacity_bytes,
        decided_by=record.crust.decided_by or "",
        state=entry.state,
        sandbox_id=claim.sandbox_id if claim else "",
        published_at=_timestamp(record.crust.published_at.timestamp()),
        claimed_at=_timestamp(claim.claimed_at.timestamp()) if claim and claim.claimed_at else None,
        claimed_by_pid=claim.pid if claim else 0,
        request_id=record.crust.request_id or "",
        pod=record.crust.pod or "",
        message=_message(entry),
    )


def _message(entry: Entry) -> str:
    """The error of the claim; of a dead claim, too, or that it is dead, and whether its process lives."""
    if entry.claim_error is not None or entry.claim is None:
        return str(entry.claim_error or "")
    sandbox, process = entry.claim.sandbox_id, entry.claim.process
    if entry.live or (entry.claim.error and process is None):
        return entry.claim.error
    match processes.lives(process) if process is not None else answers.Absent():
        case answers.Present(machine):
            lives = (
                f"nobody holds the claim of sandbox {sandbox}, and its process {machine.pid} runs"
            )
            return "; ".join(filter(None, (f"{lives}: HypervisorLives", entry.claim.error)))
        case answers.Unseen(error):
            return f"nobody holds the claim of sandbox {sandbox}; {error}"
    left = f"sandbox {sandbox} ended and left its claim, which holds nothing any more"
    return entry.claim.error or left


def _timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    return _Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
