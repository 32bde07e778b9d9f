"""Tracing: off by default and then without cost; a collector that hangs holds nothing up."""

import asyncio
import re
import subprocess
import sys
import tempfile
import threading

import grpc
import pytest

from crust.core import logs, operations, traces
from crust.core.supervised import Health
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.rpc import call, tracing
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import SocketPort
from crust.rpc.serving.worker_watch import WorkerWatch
from crust.rpc.status import PeerStatus
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver
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
    is_refused = raised("TracesNotInstalled", match=r"crust-csi\[otel\]")
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


# The health of a part whose threads hang: it names the part and what hangs, and recovers.


async def test_watchdog_is_told_while_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, health, dead, pings = Workers("the proxy", limit=1), Health(), threading.Event(), []
    watch = WorkerWatch(
        pool, operations.KeyedOperations(pool), health, ping=lambda: pings.append("alive")
    )
    await watch.check_threads()
    assert pings == ["alive"]
    hung = asyncio.create_task(pool.run(dead.wait))
    await asyncio.sleep(0)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    await watch.check_threads()
    assert pings == ["alive"]
    assert [problem.error_name for problem in health.problems.values()] == ["NoWorkerFree"]
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    dead.set()
    await hung
    await watch.check_threads()
    assert pings == ["alive"] * 2
    assert health.problems == {}


async def test_operation_without_end_is_shown_and_fails_no_probe() -> None:
    pool, health, dead = Workers("the proxy", limit=2), Health(), threading.Event()
    running = operations.KeyedOperations(pool)

    async def work() -> bool:
        return await workers.run(dead.wait)

    watch = WorkerWatch(pool, running, health)
    with pytest.raises(operations.OperationOverdue):
        await running.run("vol-1", "NodeUnpublishVolume", None, work, limit_s=0)
    await watch.check_threads()
    (problem,) = health.problems.values()
    assert "1 operations of the proxy do not end: NodeUnpublishVolume of vol-1" in str(problem)
    health.check_healthy()
    dead.set()
    await running.idle()
    await watch.check_threads()
    assert health.problems == {}


async def test_unhealthy_part_says_what_hangs_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    health, dead = Health(), threading.Event()
    shim, other = Workers("the shim at /s", limit=5), Workers("the shim at /other", limit=1)
    running = operations.KeyedOperations(shim)

    begun = threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        dead.wait()

    calls = []
    for number in range(5):
        call = running.run(f"vol-{number}", "NodePublishVolume", None, lambda: workers.run(hang))
        calls.append(asyncio.create_task(call))
        assert await asyncio.to_thread(begun.acquire, timeout=50)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    watch = WorkerWatch(shim, running, health)
    await watch.check_threads()
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    await WorkerWatch(other, operations.KeyedOperations(other), health).check_threads()
    assert [*health.problems] == ["threads of the shim at /s"]
    with pytest.raises(workers.NoWorkerFree) as caught:
        health.check_healthy()
    sentence = str(caught.value)
    assert sentence.startswith("the shim at /s cannot take more work: none of its 5 threads")
    assert "NodePublishVolume of vol-0, NodePublishVolume of vol-1," in sentence
    assert ", and 2 more; check the disks and mounts" in sentence
    dead.set()
    await asyncio.gather(*calls)
    await watch.check_threads()
    assert health.problems == {}


async def test_watch_that_only_shows_fails_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver: dozens of unmounts that write to a slow disk take all threads, and end."""
    pool, health, dead = Workers("the driver", limit=1), Health(), threading.Event()
    hung = asyncio.create_task(pool.run(dead.wait))
    await asyncio.sleep(0)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    await WorkerWatch(
        pool, operations.KeyedOperations(pool), health, is_fatal=False
    ).check_threads()
    assert [problem.error_name for problem in health.problems.values()] == ["NoWorkerFree"]
    health.check_healthy()
    dead.set()
    await hung


# What a caller learns when the driver does not answer what it is asked first.


@pytest.mark.parametrize(
    ("details", "shown"),
    [
        ("Driver is missing version", "the driver was asked {}, and answered: {}"),
        ("[NotServedInMode] not here", "{1}"),
    ],
)
async def test_status_names_the_call_that_the_caller_did_not_send(details: str, shown: str) -> None:
    driver, failure = FakeDriver(), Failure(grpc.StatusCode.UNAVAILABLE, details)
    driver.failing = dict.fromkeys(("GetPluginInfo", "NodeGetCapabilities"), failure)
    with tempfile.TemporaryDirectory(prefix="crust-") as directory:
        socket = f"{directory}/csi.sock"
        async with fake_driver.serving(driver, socket), SocketPort(socket) as port:
            peer = CsiDriver(port)
            asked = {"GetPluginInfo": peer.name, "NodeGetCapabilities": peer.defers}
            for rpc, question in asked.items():
                with pytest.raises(PeerStatus) as caught:
                    await question()
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert caught.value.text == shown.format(f"{rpc} first", details)
            await peer.aclose()
