"""The span of the work that runs now: the core of tracing, which knows no exporter and no gRPC.

A trace follows a publish through all processes: the traceparent (W3C Trace Context) travels where the request id
does, in the metadata of a call to a peer and in the record of a published volume, from which a runtime's claim
continues it. `crust.rpc.tracing` turns tracing on; until then each function here is one comparison, and nothing of
OpenTelemetry is imported.

An attribute is a name or a code that a log line has, too. Volume context, options and secrets never become one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from crust.core import errors

if TYPE_CHECKING:
    from opentelemetry import trace

tracer: "trace.Tracer | None" = None
"""Set by `crust.rpc.tracing`; None: tracing is off."""

KEY = "traceparent"


def traceparent() -> str:
    """The current span, for another process; empty if there is none."""
    if tracer is None:
        return ""
    from opentelemetry.trace.propagation import tracecontext

    carrier: dict[str, str] = {}
    tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(KEY, "")


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, str] | None = None,
    *,
    parent: str = "",
    is_served: bool = False,
) -> "Iterator[trace.Span | None]":
    """A span while the block runs; None if tracing is off.

    Its parent is the current span, or without one the traceparent `parent` of another process. A malformed `parent`
    begins a new trace. An exception marks the span as failed, by the exception's name: a text may hold secrets. The
    server sets the status of a served call.
    """
    if tracer is None:
        yield None
        return
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation import tracecontext

    kind = trace.SpanKind.SERVER if is_served else trace.SpanKind.INTERNAL
    is_first = not trace.get_current_span().get_span_context().is_valid
    outer = None
    if parent and is_first:
        propagator = tracecontext.TraceContextTextMapPropagator()
        outer = propagator.extract({KEY: parent}, context.Context())
    with tracer.start_as_current_span(
        name, outer, kind, attributes, record_exception=False, set_status_on_exception=False
    ) as begun:
        try:
            yield begun
        except Exception as error:
            if not is_served:  # the server sets the status of a call
                name = error.error_name if isinstance(error, errors.CrustError) else ""
                fail(begun, name or type(error).__name__)
            raise


def fail(begun: "trace.Span", reason: str) -> None:
    """Mark a span as failed by `reason`: the name of an error or of a status, never a text."""
    from opentelemetry import trace

    begun.set_attribute("error.type", reason)
    begun.set_status(trace.StatusCode.ERROR)
