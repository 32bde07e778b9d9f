"""The decision whether a publish is deferred."""

import pytest

from crust import deferral_keys
from crust.proxy import policy


@pytest.mark.parametrize(
    ("flag", "block", "context", "defer", "handler"),
    [
        (False, False, {}, False, None),
        (True, False, {}, True, None),
        (True, False, {"crust.dev/defer": "never"}, True, None),
        (True, False, {"crust.dev/runtime-handler": "kata"}, True, "kata"),
        (False, False, {"crust.dev/defer": "always"}, True, None),
        (False, False, {"crust.dev/defer": "never"}, False, None),
        (False, True, {"crust.dev/defer": "always"}, False, None),
        (False, False, {"crust.dev/runtime-handler": "kata"}, False, None),
        (False, False, {"pool": "a"}, False, None),
    ],
)
def test_flag_decides_before_volume_context(
    *, flag: bool, block: bool, context: dict[str, str], defer: bool, handler: str | None
) -> None:
    decision = policy.decide(flag=flag, block=block, context=context)
    assert (decision.defer, decision.handler) == (defer, handler)
    assert decision.decider


@pytest.mark.parametrize("wish", ["", "Always", "yes", "true", "a" * 500])
def test_unknown_defer_value_is_refused(wish: str) -> None:
    with pytest.raises(deferral_keys.InvalidDeferKey) as caught:
        policy.decide(flag=False, block=False, context={"crust.dev/defer": wish})
    assert len(str(caught.value)) < 300


def test_a_raw_block_volume_cannot_be_deferred_by_flag() -> None:
    with pytest.raises(policy.CannotDeferRawBlock):
        policy.decide(flag=True, block=True, context={})


def test_volume_whose_runtime_class_decides_is_refused_with_the_remedy() -> None:
    with pytest.raises(policy.RuntimeClassUnknown, match="always or never"):
        policy.decide(flag=False, block=False, context={"crust.dev/defer": "runtime-class"})
