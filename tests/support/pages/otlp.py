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
    span: trace_pb2.Span

    @property
    def attributes(self) -> dict[str, str]:
        return _attributes(self.span.attributes)

    @property
    def has_failed(self) -> bool:
        return self.span.status.code == trace_pb2.Status.STATUS_CODE_ERROR


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
            for sent in request.resource_spans:
                service = _attributes(sent.resource.attributes)["service.name"]
                for scope in sent.scope_spans:
                    self.spans += [Received(service, span) for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, condition: Callable[[list[Received]], bool]) -> list[Received]:
        """All spans, once they fulfil the condition."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: condition(self.spans))
            return list(self.spans)


def _attributes(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    return {
        attribute.key: str(getattr(attribute.value, attribute.value.WhichOneof("value") or ""))
        for attribute in attributes
    }


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
