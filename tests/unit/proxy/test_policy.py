"""The decision whether a publish is deferred."""

import pytest

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
def test_defer_value_other_than_always_or_never_is_refused(wish: str) -> None:
    with pytest.raises(policy.InvalidDeferPolicy) as caught:
        policy.decide(flag=False, block=False, context={"crust.dev/defer": wish})
    assert len(str(caught.value)) < 300


def test_a_raw_block_volume_cannot_be_deferred_by_flag() -> None:
    with pytest.raises(policy.CannotDeferRawBlock):
        policy.decide(flag=True, block=True, context={})
