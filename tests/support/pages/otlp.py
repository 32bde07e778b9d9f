"""A receiver of OpenTelemetry's own protocol, in this process: the spans that real exporters send to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class Received:
    """One span, with the service that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]
    has_failed: bool


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """What has arrived so far."""

    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans of a batch."""
        async with self._arrived:
            self.raw.append(request.SerializeToString())
            for each in request.resource_spans:
                service = _attributes(each.resource.attributes)["service.name"]
                for scope in each.scope_spans:
                    self.spans += [_received(service, span) for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, condition: Callable[[list[Received]], bool]) -> list[Received]:
        """All spans, once they fulfil the condition."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: condition(self.spans))
            return list(self.spans)


def _received(service: str, span: trace_pb2.Span) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_attributes(span.attributes),
        has_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(found: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    values: dict[str, str] = {}
    for each in found:
        kind = each.value.WhichOneof("value")
        assert kind is not None
        values[each.key] = str(getattr(each.value, kind))
    return values


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Receiver, str]]:
    """A receiver and its endpoint, while the block runs."""
    receiver, server = Receiver(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)
