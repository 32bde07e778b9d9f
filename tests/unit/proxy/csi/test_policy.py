"""The decision whether a publish is deferred."""

from collections.abc import Mapping

import pytest

from crust.core import deferral_keys, errors, volumes
from crust.core.deferral_keys import Defer
from crust.kubernetes_api.pod_name import PodName
from crust.proxy.policy import Decision, Policy
from tests.support.raised import raised

DEFER, HANDLER = "crust.dev/defer", "crust.dev/runtime-handler"
KATA = volumes.HandlerName("kata")
POD = {f"csi.storage.k8s.io/pod.{key}": f"the-{key}" for key in ("name", "namespace", "uid")}


class FakeRuntimes:
    """The API server's answer for every pod, or its error."""

    def __init__(self, answer: str | errors.CrustError) -> None:
        self.answer = answer
        self.asked: list[PodName] = []

    async def handler_of(self, pod: PodName) -> str:
        self.asked.append(pod)
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
async def test_drivers_default_decides_where_the_volume_says_nothing(
    *, default: Defer | None, defer: bool
) -> None:
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
async def test_named_handler_without_deferral_is_said_to_have_no_effect(
    context: dict[str, str],
) -> None:
    """The filesystem is mounted on the host. A CO with the flag may use one volume in both ways, in turn."""
    decision = await decide(Policy(), context)
    assert not decision.defer
    assert "crust.dev/runtime-handler=kata has no effect" in decision.decider
    assert (await decide(Policy(Defer.ALWAYS), {HANDLER: "kata"})).handler == "kata"


async def test_pod_without_name_is_refused() -> None:
    with raised("PodInfoMissing", match="podInfoOnMount"):
        await decide(by_class(), {DEFER: "runtime-class"})


async def test_api_server_that_is_away_decides_nothing() -> None:
    away = errors.PeerUnavailable("away")
    with pytest.raises(errors.PeerUnavailable):
        await decide(by_class(away), {DEFER: "runtime-class", **POD})


async def test_runtime_class_without_access_to_the_api_is_refused_with_the_remedy() -> None:
    with raised("RuntimeClassNotAsked", match="always or never"):
        await decide(Policy(), {DEFER: "runtime-class", **POD})


@pytest.mark.parametrize(
    ("context", "default"),
    [({DEFER: "runtime-class", **POD}, None), (POD, Defer.RUNTIME_CLASS)],
)
async def test_pod_of_a_deferred_volume_is_not_asked_for_again(
    context: dict[str, str], default: Defer | None
) -> None:
    away = errors.PeerUnavailable("away")
    decision = await decide(by_class(away, default), context, known=KATA)
    assert (decision.defer, decision.handler) == (True, KATA)


@pytest.mark.parametrize("context", [{}, {DEFER: "never"}])
async def test_volume_that_is_deferred_already_decides_nothing_for_another_request(
    context: dict[str, str],
) -> None:
    assert not (await decide(Policy(), context, known=KATA)).defer


@pytest.mark.parametrize("value", ["", "Always", "yes", "true", "a" * 500])
async def test_unknown_defer_value_is_refused(value: str) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey) as caught:
        await decide(Policy(), {DEFER: value})
    assert len(str(caught.value)) < 300


async def test_a_raw_block_volume_cannot_be_deferred_by_flag() -> None:
    with raised("CannotDeferRawBlock"):
        await decide(Policy(), {}, flag=True, block=True)
