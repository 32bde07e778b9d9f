"""One trace per publish through the processes of a node, and one request id from the proxy to the guest's console."""

import json
import re
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from crust.core.volumes import TargetPath
from crust.handoff import layout
from tests.support.faults.refusals import refused
from tests.support.nodes.whole_node import WholeNode, whole_node
from tests.support.pages.otlp import Received, Receiver, receiving

pytestmark = pytest.mark.vm

PROXY, SHIM, DRIVER, RUNTIME = "crust-proxy", "crust-shim", "crust-driver", "crust-kata-example"


@pytest_asyncio.fixture
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[WholeNode, Receiver]]:
    async with receiving() as (receiver, endpoint):
        monkeypatch.setenv("CRUST_TRACES", "true")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with whole_node(runtime_options=("--traces",)) as node:
            yield node, receiver
            await node.tidy()


def named(spans: list[Received], service: str, name: str) -> list[Received]:
    return [sent for sent in spans if (sent.service, sent.span.name) == (service, name)]


async def test_publish_and_mount_are_one_trace(traced: tuple[WholeNode, Receiver]) -> None:
    node, receiver = traced
    volume = await node.volume()
    target = await node.publish(volume)
    await node.output("one", target, "true")
    spans = await receiver.wait_for(lambda spans: bool(named(spans, RUNTIME, "SandboxMount")))

    (root,) = named(spans, PROXY, "NodePublishVolume")
    trace = [sent for sent in spans if sent.span.trace_id == root.span.trace_id]
    by_id = {sent.span.span_id: (sent.service, sent.span.name) for sent in trace}
    parents = {by_id[sent.span.span_id]: by_id.get(sent.span.parent_span_id) for sent in trace}
    publish = "NodePublishVolume"
    assert parents == {
        (PROXY, publish): None,
        (SHIM, publish): (PROXY, publish),
        (DRIVER, publish): (SHIM, publish),
        (RUNTIME, "SandboxMount"): (PROXY, publish),
        (RUNTIME, "ClaimVolume"): (RUNTIME, "SandboxMount"),
        (RUNTIME, "GuestMount"): (RUNTIME, "SandboxMount"),
    }
    request_ids = {
        sent.attributes["crust.request_id"] for sent in trace if sent.span.name != "GuestMount"
    }
    assert len(request_ids) == 1
    assert {root.attributes[key] for key in ("crust.volume_id", "crust.target")} == {
        volume.volume_id,
        str(target),
    }
    assert root.attributes["rpc.grpc.status_code"] == "0"
    assert not any(sent.has_failed for sent in trace)
    assert not any(b"crust.dev/defer" in batch for batch in receiver.raw), "no volume context"


async def test_refused_publish_is_a_failed_span(traced: tuple[WholeNode, Receiver]) -> None:
    node, receiver = traced
    volume = await node.volume()
    await node.publish(volume)
    code = grpc.StatusCode.FAILED_PRECONDITION
    await refused(node.publish(volume), code)
    spans = await receiver.wait_for(
        lambda spans: len(named(spans, PROXY, "NodePublishVolume")) == 2
    )
    (failed,) = [sent for sent in named(spans, PROXY, "NodePublishVolume") if sent.has_failed]
    assert failed.attributes["rpc.grpc.status_code"] == str(code.value[0])
    assert failed.attributes["error.type"]


async def test_request_id_is_in_claim_and_on_console(traced: tuple[WholeNode, Receiver]) -> None:
    node, _ = traced
    target = await node.publish(await node.volume())
    await node.output("one", target, "true")
    paths = layout.Layout(str(node.daemons.paths.volumes)).entry(TargetPath.parse(str(target)))
    with open(paths.record) as file:
        request_id = json.load(file)["crust"]["request_id"]
    with open(paths.claim) as file:
        assert json.load(file)["request_id"] == request_id
    in_proxy = (node.daemons.paths.logs / "proxy.log").read_text()
    assert re.search(rf"served .*request_id={request_id}.*rpc=NodePublishVolume", in_proxy)
    runtimes = (node.daemons.paths.logs / "runtime.log").read_text()
    assert re.search(rf"mounted .*request_id={request_id}", runtimes)
    console: list[bytes] = []
    await node.runtime.logs("one", console.append, follow=False)
    name_in_guest = str(paths.directory).rsplit("/", 1)[-1][:20]
    assert f"mount {name_in_guest} request_id={request_id}" in b"".join(console).decode()
