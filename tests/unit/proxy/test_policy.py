"""The decision whether a publish is deferred: by its context, and as it is explained."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from crust.core import errors, volumes
from crust.core.deferral_keys import Defer
from crust.core.volumes import HandlerFeature
from crust.kubernetes_api.pod_runtimes import PodName, PodRuntimes
from crust.proxy.policy import Decision, Policy
from crust.proxy.settings import KubernetesSettings
from tests.support.co import capability, stage_request
from tests.support.faults.refusals import refused
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.raised import raised
from tests.support.runtimes.fake_handler import ALL_FEATURES

DEFER, HANDLER = "crust.dev/defer", "crust.dev/runtime-handler"
KATA = volumes.HandlerName("kata")


POD = {f"csi.storage.k8s.io/pod.{key}": f"the-{key}" for key in ("name", "namespace", "uid")}


class FakeRuntimes(PodRuntimes):
    """The API server's answer for every pod, or its error."""

    def __init__(self, answer: str | errors.CrustError) -> None:
        self.answer = answer

    async def handler_of(self, pod: PodName) -> str:
        if isinstance(self.answer, errors.CrustError):
            raise self.answer
        return self.answer


def by_class(answer: str | errors.CrustError = "kata", default: Defer | None = None) -> Policy:
    return Policy(default, FakeRuntimes(answer), frozenset({"kata"}))


async def decide(
    decisions: Policy,
    context: Mapping[str, str],
    *,
    flag: bool = False,
    block: bool = False,
    known: volumes.HandlerName | None = None,
) -> Decision:
    return await decisions.decide(flag=flag, block=block, context=context, known=known)


@pytest.mark.parametrize(
    ("flag", "block", "context", "defer", "handler"),
    [
        (False, False, {}, False, None),
        (True, False, {}, True, None),
        (True, False, {DEFER: "never"}, True, None),
        (True, False, {HANDLER: "kata"}, True, "kata"),
        (False, False, {DEFER: "always"}, True, None),
        (False, False, {DEFER: "always", HANDLER: "kata"}, True, "kata"),
        (False, False, {DEFER: "never"}, False, None),
        (False, True, {DEFER: "always"}, False, None),
        (False, True, {DEFER: "runtime-class"}, False, None),
        (False, False, {"pool": "a"}, False, None),
    ],
)
async def test_flag_decides_before_volume_context(
    *, flag: bool, block: bool, context: dict[str, str], defer: bool, handler: str | None
) -> None:
    decision = await decide(Policy(), context, flag=flag, block=block)
    assert decision.defer is defer
    assert handler is None or decision.handler == handler
    assert decision.decider


@pytest.mark.parametrize("default", [None, *Defer])
async def test_volume_context_decides_before_the_drivers_default(default: Defer | None) -> None:
    decisions = by_class(default=default)
    assert (await decide(decisions, {DEFER: "always"})).defer
    assert not (await decide(decisions, {DEFER: "never"})).defer


@pytest.mark.parametrize(
    ("default", "defer"),
    [(None, False), (Defer.NEVER, False), (Defer.ALWAYS, True), (Defer.RUNTIME_CLASS, True)],
)
async def test_default_decides_for_silent_volumes(*, default: Defer | None, defer: bool) -> None:
    assert (await decide(by_class(default=default), POD)).defer is defer


@pytest.mark.parametrize(
    ("of_pod", "defer", "handler"),
    [("kata", True, "kata"), ("", False, None), ("runc", False, None)],
)
async def test_runtime_class_of_the_pod_decides_and_names_the_handler(
    *, of_pod: str, defer: bool, handler: str | None
) -> None:
    decision = await decide(by_class(of_pod), {DEFER: "runtime-class", **POD})
    assert (decision.defer, decision.handler) == (defer, handler)
    assert "the-namespace/the-name" in decision.decider


async def test_volume_and_runtime_class_that_name_two_handlers_are_refused() -> None:
    context = {DEFER: "runtime-class", HANDLER: "gvisor", **POD}
    with raised("HandlersContradict", match="gvisor"):
        await decide(by_class("kata"), context)
    assert (await decide(by_class("kata"), {**context, HANDLER: "kata"})).handler == "kata"


@pytest.mark.parametrize("context", [{HANDLER: "kata"}, {DEFER: "never", HANDLER: "kata"}])
async def test_named_handler_without_deferral_has_no_effect(context: dict[str, str]) -> None:
    """The filesystem is mounted on the host. A CO with the flag may use one volume in both ways, in turn."""
    decision = await decide(Policy(), context)
    assert not decision.defer
    assert "crust.dev/runtime-handler=kata has no effect" in decision.decider
    assert (await decide(Policy(Defer.ALWAYS), {HANDLER: "kata"})).handler == "kata"


@pytest.mark.parametrize(
    ("policy", "context", "error", "words"),
    [
        (by_class(), {DEFER: "runtime-class"}, "PodInfoMissing", "podInfoOnMount"),
        (Policy(), {DEFER: "runtime-class", **POD}, "RuntimeClassNotAsked", "always or never"),
        (
            by_class(errors.PeerUnavailable("away")),
            {DEFER: "runtime-class", **POD},
            "PeerUnavailable",
            "away",
        ),
    ],
)
async def test_publish_whose_pods_class_is_unknown_is_refused(
    policy: Policy, context: dict[str, str], error: str, words: str
) -> None:
    with raised(error, match=words):
        await decide(policy, context)


@pytest.mark.parametrize(
    ("context", "default"), [({DEFER: "runtime-class", **POD}, None), (POD, Defer.RUNTIME_CLASS)]
)
async def test_pod_of_a_deferred_volume_is_not_asked_for_again(
    context: dict[str, str], default: Defer | None
) -> None:
    away = errors.PeerUnavailable("away")
    decision = await decide(by_class(away, default), context, known=KATA)
    assert (decision.defer, decision.handler) == (True, KATA)


@pytest.mark.parametrize("context", [{}, {DEFER: "never"}])
async def test_deferred_volume_decides_nothing_for_another_request(context: dict[str, str]) -> None:
    assert not (await decide(Policy(), context, known=KATA)).defer


async def test_raw_block_volume_cannot_be_deferred_by_flag() -> None:
    with raised("CannotDeferRawBlock"):
        await decide(Policy(), {}, flag=True, block=True)


@pytest.mark.spec("D-41")
@pytest.mark.parametrize(
    ("default", "context", "block", "said"),
    [
        ("", {}, False, "as-asked"),
        ("", {DEFER: "always"}, False, "block"),
        ("", {DEFER: "runtime-class"}, False, "block"),
        ("", {"crust.dev/encryption": "luks"}, False, "block"),
        ("", {"crust.dev/format-in": "guest"}, False, "block"),
        ("", {DEFER: "always"}, True, "as-asked"),
        ("runtime-class", {}, False, "block"),
        ("always", {}, False, "block"),
        ("always", {DEFER: "never"}, False, "as-asked"),
        ("never", {}, False, "as-asked"),
    ],
)
async def test_stage_says_whether_a_publish_may_be_deferred(
    places: Places, default: str, context: dict[str, str], *, block: bool, said: str
) -> None:
    """By the same default as the publish; what the CO itself says in the metadata is no decision."""
    async with FakeNode(places, defer=default) as running:
        request = stage_request(
            "vol-1", "/staging", capability(block=block), volume_context=context
        )
        sent = (("crust-stage-as", "block"), ("crust-stage-as", "as-asked"), ("other", "kept"))
        await running.node.NodeStageVolume(request, metadata=sent, timeout=20)
        (call,) = running.driver.called("NodeStageVolume")
    assert [value for key, value in call.metadata if key == "crust-stage-as"] == [said]
    assert ("other", "kept") in call.metadata


@pytest.mark.spec("D-41")
@pytest.mark.parametrize(
    ("default", "context", "said"),
    [
        ("", {DEFER: "always"}, ["5.4.0"]),
        ("always", {HANDLER: KATA}, ["5.4.0"]),
        ("always", {HANDLER: "other"}, []),
        ("", {DEFER: "runtime-class"}, []),
        ("", {"crust.dev/format-in": "guest"}, []),
        ("always", {DEFER: "never"}, []),
    ],
)
async def test_stage_names_the_kernel_of_its_only_guests(
    places: Places, default: str, context: dict[str, str], said: list[str]
) -> None:
    async with (
        FakeNode(places, defer=default) as running,
        running.handler(name=KATA, guest_kernel="5.4.0"),
    ):
        request = stage_request("vol-1", "/staging", volume_context=context)
        sent = (("crust-guest-kernel", "1.0"),)
        await running.node.NodeStageVolume(request, metadata=sent, timeout=20)
        (call,) = running.driver.called("NodeStageVolume")
    assert [value for key, value in call.metadata if key == "crust-guest-kernel"] == said


Code = grpc.StatusCode


@pytest.fixture
def api() -> FakeKubernetes:
    return fake_kubernetes.with_a_microvm()


@pytest.fixture
def settings(api: FakeKubernetes, tmp_path: Path) -> Iterator[KubernetesSettings]:
    with fake_kubernetes.asked_by_a_proxy(api, tmp_path) as settings:
        yield settings


@pytest_asyncio.fixture
async def asking(places: Places, settings: KubernetesSettings) -> AsyncIterator[FakeNode]:
    async with (
        FakeNode(places, defer="runtime-class", kubernetes=settings) as running,
        running.handler(),
    ):
        yield running


def info(pod: str) -> dict[str, str]:
    keys = {"name": pod, "namespace": "default", "uid": f"uid-{pod}"}
    return {f"csi.storage.k8s.io/pod.{key}": value for key, value in keys.items()}


async def test_pod_of_microvm_gets_device_and_another_the_mount(asking: FakeNode) -> None:
    vm, plain = asking.places.target("vm"), asking.places.target("plain")
    await asking.co.publish("vol-1", vm, defer=False, volume_context=info("vm"))
    asking.check_published("vol-1", vm)
    entry = asking.entry(vm)
    assert entry is not None
    assert "default/vm has the handler kata" in (entry.require().crust.decided_by or "")
    await asking.co.publish("vol-2", plain, defer=False, volume_context=info("plain"))
    assert asking.entry(plain) is None
    assert not asking.driver.published[plain].deferred


@pytest.mark.parametrize("features", [ALL_FEATURES, ALL_FEATURES - {HandlerFeature.SUB_PATH}])
async def test_publish_names_the_sub_path_of_a_known_pod(
    places: Places,
    settings: KubernetesSettings,
    api: FakeKubernetes,
    features: frozenset[HandlerFeature],
) -> None:
    """The kubelet would say of it that it failed to create a directory, and name no reason."""
    mounts = [{"name": "data", "mountPath": "/d", "subPath": "a"}]
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    api.add_pod("db", "uid-db", "microvm", containers=[{"volumeMounts": mounts}], volumes=[claim])
    target, fields = places.target("db"), {"defer": False, "volume_context": info("db")}
    async with (
        FakeNode(places, defer="runtime-class", kubernetes=settings) as node,
        node.handler(features=features),
    ):
        publish = node.co.publish("vol-1", target, **fields)  # type: ignore[arg-type]
        if HandlerFeature.SUB_PATH in features:
            await publish
            return
        await refused(publish, Code.FAILED_PRECONDITION, "UnsupportedByHandler", "subPath")
        node.check_untouched(target)


async def test_publish_while_api_is_away_changes_nothing(
    asking: FakeNode, api: FakeKubernetes
) -> None:
    target = asking.places.target("new")
    api.faults.status = 503
    publish = asking.co.publish("vol-1", target, defer=False, volume_context=info("new"))
    await refused(publish, Code.UNAVAILABLE, "default/new", "KubernetesApiUnavailable")
    asking.check_untouched(target)
    api.faults.status = 0
    api.add_pod("new", "uid-new", "microvm")
    await asking.co.publish("vol-1", target, defer=False, volume_context=info("new"))
    asking.check_published("vol-1", target)


async def test_proxy_starts_while_the_api_is_away(
    places: Places, settings: KubernetesSettings, api: FakeKubernetes
) -> None:
    api.faults.status = 503
    async with FakeNode(places, kubernetes=settings) as asking, asking.handler():
        await asyncio.to_thread(api.arrivals.acquire)
        target = places.target("one")
        await asking.co.publish("vol-1", target)
        asking.check_published("vol-1", target)
