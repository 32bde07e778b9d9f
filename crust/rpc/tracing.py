"""Turns tracing on, and gives each served unary call a span; `crust.core.traces` makes the spans.

Spans go to an OpenTelemetry collector by OTLP over gRPC. OpenTelemetry's usual variables name the collector and
choose the spans (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES, …). A thread of its own
sends spans in batches. An absent collector costs spans: the queue is bounded, no call waits for it, and the end of
the process waits for the last batch for STOP_S at most.

Streams have no span, because a session is open for days. Calls that a kubelet makes all day have none either.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

import crust
from crust.core import credentials, errors, logs, traces
from crust.rpc import status
from crust.rpc.call import Call
from crust.rpc.status import PeerStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

STOP_S = 2.0
"""How long the end of the process waits for the collector."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ATTRIBUTES = {
    "request_id": "crust.request_id",
    "driver": "crust.driver",
    "volume_id": "crust.volume_id",
    "volume_name": "crust.volume_name",
    "snapshot_id": "crust.snapshot_id",
    "group_snapshot_id": "crust.group_snapshot_id",
    "target": "crust.target",
}
"""Field of a log line to attribute of a span."""


class TracesNotConfigured(errors.InvalidRequest):
    def __init__(self, why: str) -> None:
        super().__init__("traces cannot be sent", why=why)


@contextmanager
def exporting(program: str, *, is_on: bool) -> Iterator[None]:
    """Trace while the block runs, as the service `crust-<program>` or OTEL_SERVICE_NAME.

    Raises `TracesNotInstalled` and `TracesNotConfigured`. Blocks at its end, for STOP_S at most.
    """
    if not is_on or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        yield
        return
    provider = _provider(program)
    traces.tracer = provider.get_tracer("crust", crust.__version__)
    _log.info("traces", extra={"service": provider.resource.attributes["service.name"]})
    try:
        yield
    finally:
        traces.tracer = None
        # its own limit is 30 s; an absent collector loses the spans of the last batch
        ending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(STOP_S)


def _provider(program: str) -> "TracerProvider":
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as err:
        raise errors.NotReady.named(
            "TracesNotInstalled", "traces cannot be sent", why="OpenTelemetry is not installed"
        ) from err
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter != "otlp":
        raise TracesNotConfigured(f"OTEL_TRACES_EXPORTER is {exporter!r}")
    for name in _PROTOCOLS:
        if os.environ.get(name, "grpc") != "grpc":
            raise TracesNotConfigured(f"{name} is {os.environ[name]!r}")
    attributes = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"crust-{program}",
        "service.version": crust.__version__,
        "host.name": socket.gethostname(),
    }
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as err:
        raise TracesNotConfigured(f"an OTEL_… variable is refused: {err}") from err
    return provider


@contextmanager
def served(call: Call, server: str) -> Iterator[None]:
    """The span of a call that the block serves, by its RPC's name; it continues the caller's trace.

    An inner call runs in the task of its outer call, and its span belongs to that call's span.
    """
    service, _, name = call.method.removeprefix("/").partition("/")
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": name,
        "crust.server": server,
    }
    parents = [
        value for key, value in call.metadata if key == traces.KEY and isinstance(value, str)
    ]
    with traces.span(name, attributes, parent=next(iter(parents), ""), is_served=True) as span:
        try:
            yield
        except PeerStatus as refusal:
            _end(span, refusal.code, status.name_in(refusal.trailing))
            raise
        except BaseException:
            _end(span, grpc.StatusCode.CANCELLED)
            raise
        _end(span, grpc.StatusCode.OK)


def _end(span: "Span | None", code: grpc.StatusCode, error_name: str = "") -> None:
    if span is None or not span.is_recording():
        return
    fields = logs.context.get() or {}
    for field, attribute in _ATTRIBUTES.items():
        if field in fields:
            span.set_attribute(attribute, credentials.shown(fields[field]))
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        traces.fail(span, error_name or code.name)
