"""A service: errors become statuses, a bug shows only its request id, and every caller is answered."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import REGISTRY

from crust.core import errors, logs, metrics, traces
from crust.host.answers import NotSeen
from crust.rpc import channel, status
from crust.rpc.call import Call
from crust.rpc.serving import server
from crust.rpc.serving.service import Methods, Service
from crust.rpc.status import PeerStatus
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused

Code = grpc.StatusCode
SECRET = "s3same"


class Behaviour:
    """One behaviour as three kinds of methods."""

    def __init__(self) -> None:
        self.behave: Callable[[Call], Any] = lambda _: None

    def service(self) -> Service:
        unary = dict.fromkeys(("/x/Unary", "/x/Probe", "/csi.v1.Node/NodeGetInfo"), self._unary)
        streams = dict.fromkeys(("/x/Stream", "/csi.v9.New/Stream"), self._stream)
        return Service("t", Methods(unary, streams))

    def fail(self, error: BaseException) -> None:
        async def behave(_: Call) -> None:
            raise error

        self.behave = behave

    async def _unary(self, _: object, __: bytes, call: Call) -> bytes:
        await self.behave(call)
        return b"ok"

    async def _stream(self, _: object, __: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        yield b"first"
        await self.behave(call)


@pytest.fixture
async def service(short: str) -> AsyncIterator[tuple[Behaviour, grpc.aio.Channel]]:
    built = Behaviour()
    path = f"{short}/a.sock"
    async with server.serving(path, built.service()), channel.connect(path) as caller:
        yield built, caller


async def _call(caller: grpc.aio.Channel, shape: str) -> None:
    if shape == "Unary":
        unary: Any = caller.unary_unary("/x/Unary")
        await unary(b"", timeout=10)
    else:
        stream: Any = caller.unary_stream("/x/Stream")
        [answer async for answer in stream(b"", timeout=10)]


SHAPES = pytest.mark.parametrize("shape", ["Unary", "Stream"])
Fixture = tuple[Behaviour, grpc.aio.Channel]


@SHAPES
async def test_error_is_answered_with_sentence_and_name_and_logged(
    service: Fixture, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built, caller = service
    built.fail(errors.Exhausted("no slot", why="x" * 3_000, hint="wait"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call(caller, shape)
    sentence = caught.value.details()
    assert (sentence or "").startswith("[Exhausted] no slot: xxx")
    ((_, raw),) = caught.value.trailing_metadata()
    assert isinstance(raw, bytes)
    details = status_pb2.Status.FromString(raw)
    info = error_details_pb2.ErrorInfo()
    assert details.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("Exhausted", "crust.dev")
    assert re.fullmatch("[0-9a-f]{12}", info.metadata["request_id"])
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert (details.code, details.message) == (Code.RESOURCE_EXHAUSTED.value[0], sentence)
    (line,) = [vars(record) for record in caplog.records if record.msg == "served"]
    assert (line["code"], line["error_name"]) == ("RESOURCE_EXHAUSTED", "Exhausted")
    assert line["error"].endswith(f"{'x' * 3_000}; wait")


@pytest.mark.parametrize(
    ("asked", "keys"), [("", []), ("deferral", []), ("deferral,error-info", ["grpc-status-details-bin"])]
)  # fmt: skip
async def test_csi_call_has_status_details_only_if_its_caller_asks(
    service: Fixture, asked: str, keys: list[str]
) -> None:
    """CSI, Error Scheme: status.details MUST be empty."""
    built, caller = service
    built.fail(errors.Exhausted("no slot"))
    call: Any = caller.unary_unary("/csi.v1.Node/NodeGetInfo")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=10, metadata=(("crust-extensions", asked),))
    assert caught.value.details() == "[Exhausted] no slot"
    assert [key for key, _ in caught.value.trailing_metadata()] == keys


@SHAPES
async def test_error_of_peer_keeps_its_name_in_the_log(
    service: Fixture, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built, caller = service
    written = asyncio.Event()

    def seen(record: logging.LogRecord) -> bool:
        if record.msg == "served":
            written.set()
        return True

    caplog.handler.addFilter(seen)

    async def fail(call: Call) -> None:
        raise status.of(errors.Exhausted("no slot"), call)

    built.behave = fail
    await refused(_call(caller, shape), Code.RESOURCE_EXHAUSTED, "[Exhausted] no slot")
    # The line is written when the answer is on its way, so the caller may be first.
    await asyncio.wait_for(written.wait(), 10)
    (line,) = [vars(record) for record in caplog.records if record.msg == "served"]
    assert (line["error_name"], line["error"]) == ("Exhausted", "[Exhausted] no slot")


@SHAPES
async def test_bug_is_answered_with_request_id_and_logged(
    service: Fixture, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    built, caller = service
    ids: list[str] = []

    async def fail(_: Any) -> None:
        ids.append((logs.context.get() or {})["request_id"])
        raise ValueError(SECRET)

    built.behave = fail
    text = await refused(_call(caller, shape), Code.INTERNAL, shape, "unexpected error")
    assert SECRET not in text
    assert ids == re.findall(r"request id ([0-9a-f]{12})", text)
    # in the message: an author's log drops what is in fields
    (bug,) = [
        record for record in caplog.records if record.getMessage().startswith("unexpected error")
    ]
    assert ids[0] in bug.getMessage()
    assert bug.exc_info is not None
    assert isinstance(bug.exc_info[1], ValueError)


@SHAPES
async def test_status_of_a_peer_passes_unchanged(service: Fixture, shape: str) -> None:
    built, caller = service

    built.fail(PeerStatus(Code.UNAUTHENTICATED, "who are you"))
    await refused(_call(caller, shape), Code.UNAUTHENTICATED, "who are you")
    with pytest.raises(PeerStatus) as caught:
        await built.service().answer(Call("/x/Unary"), b"")
    assert caught.value.__cause__ is None


@SHAPES
async def test_cancelled_inner_task_is_answered_at_once(service: Fixture, shape: str) -> None:
    """grpc.aio answers nothing if a handler ends with a CancelledError that its caller did not cause."""
    built, caller = service

    built.fail(asyncio.CancelledError())
    await refused(_call(caller, shape), Code.UNAVAILABLE, "interrupted", "retry")


async def test_cancelled_call_is_logged_as_cancelled(
    service: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built, caller = service
    gate = Gate()
    built.behave = lambda _: gate.stop()
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = caller.unary_unary("/x/Unary")
    call = method(b"")
    waiting = asyncio.ensure_future(_result(call))
    await gate.entered.wait()
    call.cancel()
    await gate.cancelled.wait()
    await asyncio.wait([waiting])
    assert [vars(record).get("code") for record in caplog.records if record.msg == "served"] == [
        "CANCELLED"
    ]


async def test_each_call_is_one_line_with_its_own_id(
    service: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built, caller = service
    ids: list[str] = []

    async def note(_: Any) -> None:
        ids.append((logs.context.get() or {})["request_id"])

    built.behave = note
    await _call(caller, "Unary")
    await _call(caller, "Unary")
    probe: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = caller.unary_unary("/x/Probe")
    await probe(b"", timeout=10)
    lines = [vars(record) for record in caplog.records if record.msg == "served"]
    assert [(line["rpc"], line["code"]) for line in lines] == [("Unary", "OK"), ("Unary", "OK")]
    assert all(line["ms"] >= 0 for line in lines)
    assert len(set(ids)) == 3


async def _result(call: Any) -> Any:
    return await call


async def test_unknown_pass_through_method_leaves_no_name_in_the_metrics(service: Fixture) -> None:
    """Callers choose unknown names, without a bound; known methods are counted by name."""
    built, channel_to = service
    built.behave = _nothing
    caller: Any = channel_to
    streamed = caller.unary_stream("/csi.v9.New/Stream")(b"x", timeout=5)
    assert [answer async for answer in streamed]
    await caller.unary_unary("/csi.v1.Node/NodeGetInfo")(b"", timeout=5)
    await caller.unary_unary("/x/Unary")(b"x", timeout=5)
    samples = [sample for metric in metrics.csi_operations.collect() for sample in metric.samples]
    names = {sample.labels["method_name"] for sample in samples}
    assert {"other", "/csi.v1.Node/NodeGetInfo"} <= names
    assert not [name for name in names if "New" in name or name.startswith("/x/")]


async def test_call_without_an_answer_of_the_kernel_is_counted(service: Fixture) -> None:
    built, channel_to = service
    caller: Any = channel_to
    counts: list[float] = []
    for error in (errors.NotReady("no"), NotSeen("cannot see the users of /dev/loop1")):
        built.fail(error)
        call = caller.unary_unary("/csi.v1.Node/NodeGetInfo")(b"", timeout=5)
        await refused(call, Code.FAILED_PRECONDITION if not counts else Code.UNAVAILABLE)
        counts.append(REGISTRY.get_sample_value("crust_calls_unseen_total") or 0)
    assert counts[1] - counts[0] == 1


async def test_csi_call_is_measured_as_a_kubelet_measures_it(service: Fixture) -> None:
    built, channel_to = service

    built.fail(errors.NotReady("no"))
    caller: Any = channel_to
    await refused(
        caller.unary_unary("/csi.v1.Node/NodeGetInfo")(b"", timeout=5), Code.FAILED_PRECONDITION
    )
    labels = {
        "driver_name": "unknown-driver",
        "method_name": "/csi.v1.Node/NodeGetInfo",
        "grpc_status_code": "FailedPrecondition",
        "migrated": "false",
    }
    samples = [sample for metric in metrics.csi_operations.collect() for sample in metric.samples]
    ours = [
        sample
        for sample in samples
        if {k: v for k, v in sample.labels.items() if k != "le"} == labels
    ]
    buckets = [
        sample.labels["le"] for sample in ours if sample.name == "csi_operations_seconds_bucket"
    ]
    of_a_kubelet = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600, math.inf)
    assert [float(bound) for bound in buckets[buckets.index("0.1") :]] == list(of_a_kubelet)
    assert buckets[0] == "0.001", "most calls take milliseconds"


async def _nothing(_: Any) -> None:
    return None


async def test_span_has_its_code_and_its_errors_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "tracer", provider.get_tracer("test"))
    built, parent = Behaviour(), f"00-{'a' * 32}-{'b' * 16}-01"
    served = built.service()
    built.behave = _nothing
    await served.answer(Call("/x/Unary", ((traces.KEY, parent),)), b"")

    built.fail(errors.Exhausted("no slot"))
    await refused(served.answer(Call("/x/Unary"), b""), Code.RESOURCE_EXHAUSTED)
    answered, failed = exporter.get_finished_spans()
    assert answered.context is not None
    assert f"{answered.context.trace_id:032x}" == "a" * 32
    attributes = [dict(span.attributes or {}) for span in (answered, failed)]
    assert [span["rpc.grpc.status_code"] for span in attributes] == [0, 8]
    assert attributes[1]["error.type"] == "Exhausted"
    assert "error.type" not in attributes[0]
