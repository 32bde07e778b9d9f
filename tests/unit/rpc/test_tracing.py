"""Tracing: off by default and then without cost; a collector that hangs holds nothing up."""

import re
import subprocess
import sys
import threading

import pytest

from crust.core import logs, traces
from crust.rpc import call, tracing
from tests.support.raised import raised

DAEMONS = (
    "crust.node.node_process, crust.rpc.tracing, crust.rpc.serving.service, crust.runtime_handler"
)


def test_nothing_of_opentelemetry_is_imported_while_it_is_off() -> None:
    script = f"import sys, {DAEMONS}\nwith crust.rpc.tracing.exporting('x', is_on=False): pass\n"
    script += "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_span_is_sent_while_tracing_is_off() -> None:
    around = logs.context.set({"request_id": "abc"})
    try:
        with traces.span("Anything") as span:
            assert span is None
            assert call.identified(()) == (("crust-request-id", "abc"),)
    finally:
        logs.context.reset(around)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
    ],
)
def test_what_the_environment_cannot_have_is_refused_by_its_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    is_refused = pytest.raises(tracing.TracesNotConfigured, match=re.escape(value))
    with is_refused, tracing.exporting("test", is_on=True):
        pass
    assert traces.tracer is None


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    is_refused = raised("TracesNotInstalled", match="its extra otel")
    with is_refused, tracing.exporting("test", is_on=True):
        pass


def test_end_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = _Hangs()
    monkeypatch.setattr(tracing, "_provider", lambda program: provider)
    monkeypatch.setattr(tracing, "STOP_S", 0.01)
    with tracing.exporting("test", is_on=True):
        assert traces.tracer is provider.tracer
    assert traces.tracer is None
    assert provider.stopping.wait(10)
    assert not provider.stopped.is_set()
    provider.answers.set()
    assert provider.stopped.wait(10)


class _Hangs:
    """A provider whose shutdown ends when `answers` is set."""

    def __init__(self) -> None:
        self.tracer = object()
        self.resource = type("Resource", (), {"attributes": {"service.name": "test"}})
        self.answers, self.stopping, self.stopped = (threading.Event() for _ in range(3))

    def get_tracer(self, *_: object) -> object:
        return self.tracer

    def shutdown(self) -> None:
        self.stopping.set()
        self.answers.wait()
        self.stopped.set()


def test_span_continues_the_traceparent_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    monkeypatch.setattr(traces, "tracer", TracerProvider(shutdown_on_exit=False).get_tracer("test"))
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with traces.span("Claim", parent=parent):
        inner = traces.traceparent()
        assert inner.split("-")[1] == "a" * 32
        assert inner.split("-")[2] != "b" * 16
        with traces.span("Below", parent=f"00-{'c' * 32}-{'d' * 16}-01"):
            assert traces.traceparent().split("-")[1] == "a" * 32, "the current span is the parent"
    with traces.span("Malformed", parent="00-nonsense"):
        assert traces.traceparent().split("-")[1] != "a" * 32
