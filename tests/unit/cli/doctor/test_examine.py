"""`crust doctor`: all checks of a node, one that fails itself, and the command."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.cli.doctor.node import CHECKS, Finding, Level, Node
from crust.core import errors
from crust.kubernetes_api.api import KubernetesApiUnavailable
from tests.support.faults import lies
from tests.support.nodes.commands import invoked
from tests.support.nodes.examined_node import bad, found, write


@pytest.mark.parametrize(
    "name", [check for check in CHECKS if check not in ("sockets", "csidriver")]
)
def test_good_node_passes(good: Node, name: str) -> None:
    assert {finding.level for finding in found(good, name)} == {Level.OK}


def test_check_that_fails_itself_is_an_error(good: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Node) -> Iterator[Finding]:
        raise PermissionError("not allowed")

    monkeypatch.setitem(CHECKS, "kernel", fail)
    assert "not allowed" in bad(good, "kernel", Level.ERROR)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("beside", ["", "run/udev/control usr/sbin/lvm usr/sbin/multipathd"])
def test_check_without_an_answer_says_why_or_the_truth(good: Node, name: str, beside: str) -> None:
    for path in beside.split():
        write(good.root, path)
    truth, concerns = found(good, name), lies.Concerns(frozenset(), (str(good.root),))
    for asked in lies.failures(lambda: found(good, name), concerns, errnos_of=lies.in_turn(0)):
        reason = os.strerror(asked.failure.errno)
        findings = asked.value or ()
        seen = any(reason in finding.why for finding in findings if finding.level is Level.ERROR)
        assert seen or findings == truth, str(asked.failure)


@pytest.mark.parametrize(
    "refusal", [KubernetesApiUnavailable("x", "refused"), errors.NotReady("it is not there")]
)
def test_check_that_root_cannot_help_does_not_name_root(
    good: Node, monkeypatch: pytest.MonkeyPatch, refusal: errors.CrustError
) -> None:
    def fail(_: Node) -> Iterator[Finding]:
        raise refusal

    monkeypatch.setitem(CHECKS, "kernel", fail)
    assert "as root" not in bad(good, "kernel", Level.ERROR)


async def test_command_prints_json_and_exits_1_for_an_error(root: Path) -> None:
    result = await invoked("doctor", "--check", "proxy", "--run-dir", str(root), "-o", "json")
    document = json.loads(result.output)
    assert (result.exit_code, document["healthy"]) == (1, False)
    assert [finding["check"] for finding in document["findings"]] == ["proxy"]


async def test_unknown_check_is_wrong_usage() -> None:
    result = await invoked("doctor", "--check", "x")
    assert result.exit_code == 2
    assert "there are" in result.output
