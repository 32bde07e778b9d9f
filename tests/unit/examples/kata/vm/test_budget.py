"""The pace of a guest's messages."""

import pytest

from examples.kata.vm import budget


def test_budget_paces_messages_and_bytes_and_refills() -> None:
    now_s = [100.0]
    spent = budget.MessageBudget(lambda: now_s[0])
    assert spent.spend(100, 1000) == 0
    assert spent.spend(budget.MESSAGES_PER_S, 0) == pytest.approx(0.8)
    assert spent.spend(0, budget.BYTES_PER_S) == pytest.approx(0.8, abs=0.01)
    now_s[0] += 1
    assert spent.spend(1, 1) == 0
