"""deploy/prometheus: the alert rules are valid, and each fires for the node that has the trouble."""

import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[3] / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "crust-rules.yaml"), ("test", "rules", "crust-rules.test.yaml")],
)
def test_rules_are_what_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_each_alert_is_tested() -> None:
    named = [
        line.split(": ")[1]
        for line in (RULES / "crust-rules.yaml").read_text().splitlines()
        if "- alert:" in line
    ]
    tested = (RULES / "crust-rules.test.yaml").read_text()
    assert len(named) > 5
    assert [each for each in named if f"alertname: {each}\n" not in tested] == []
