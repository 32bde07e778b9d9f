"""What a run prints: a line for each case that ran, below it what was broken, and a summary.

A skipped case has no line; the summary has one for each reason. The reports for machines are JUnit XML, in which only
what fails the run is a failure, and JSON with everything.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from crust.conformance.results import Finding, Outcome, Result, Results

_COLORS: dict[Outcome, str] = {
    "passed": "green",
    "failed": "red",
    "warning": "yellow",
    "note": "cyan",
    "skipped": "white",
}
_MEANING: tuple[tuple[Outcome, str], ...] = (
    ("failed", "a MUST is broken"),
    ("warning", "a SHOULD is broken"),
    ("note", "differs from practice that CSI leaves open"),
)
_INDENT = " " * 15
_SHOWN_AS = {"why": "but"}


class Report:
    """Prints to stdout as the run goes on; nothing if `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def result(self, result: Result) -> None:
        """One case."""
        if result.outcome == "skipped":
            return
        word = click.style(f"{result.outcome:<8}", fg=_COLORS[result.outcome])
        self._line(f"{result.case.number} {word} {result.case.rule}")
        for finding in result.findings:
            self._finding(finding)

    def remark(self, text: str) -> None:
        """What holds for the whole run."""
        self._line(f"{click.style('note', bold=True)}: {text}")

    def summary(self, results: Results, *, strict: bool) -> None:
        """How many of each outcome; what was skipped, by reason; what was broken."""
        reasons = defaultdict[str, list[str]](list)
        for number, why in results.skipped.items():
            reasons[why].append(number)
        if reasons:
            self._line("")
            self._line("skipped, because the subject has not, or was not given:")
        for why, numbers in sorted(reasons.items(), key=lambda each: -len(each[1])):
            self._line(f"  {len(numbers):>3} {why}: {_ranges(numbers)}")
        for outcome, meaning in _MEANING:
            self._broken(results, outcome, meaning)
        counts = [f"{len(results.numbers(color))} {color}" for color in _COLORS]
        self._line("")
        self._line(", ".join(counts) + ("" if not strict else "; strict: all but passed ones fail"))

    def _broken(self, results: Results, outcome: Outcome, meaning: str) -> None:
        found = [each for each in results.each if each.outcome == outcome]
        if found:
            self._line("")
            self._line(f"{click.style(outcome, fg=_COLORS[outcome])}: {meaning}")
        for each in found:
            self._line(f"  {each.case.number} {each.case.rule}")

    def _finding(self, finding: Finding) -> None:
        for key, text in _facts(finding).items():
            for number, line in enumerate(text.splitlines()):
                name = "" if number else _SHOWN_AS.get(key, key)
                self._line(f"{_INDENT}{name:<7}{line}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, color=False if "NO_COLOR" in os.environ else None)


def _ranges(numbers: Iterable[str]) -> str:
    """`C-101..C-104, C-110`."""
    runs: list[list[str]] = []
    for number in sorted(numbers):
        if runs and int(number[2:]) == int(runs[-1][-1][2:]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def write_junit(path: Path, results: Results, failing: Iterable[Outcome]) -> None:
    """One testcase for each case; a finding that does not fail the run is its output."""
    failing = frozenset(failing)
    failures = sum(each.outcome in failing for each in results.each)
    skipped = sum(each.outcome == "skipped" for each in results.each)
    suite = ElementTree.Element("testsuite", name="crust conformance", errors="0")
    suite.set("tests", str(len(results.each)))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    suite.set("time", f"{sum(each.seconds for each in results.each):.3f}")
    for each in results.each:
        suite.append(_testcase(each, failing))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def write_json(path: Path, results: Results) -> None:
    """Every case with its clauses and findings."""
    found = {"exit_code": results.exit_code, "cases": [_described(each) for each in results.each]}
    path.write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n")


def _testcase(result: Result, failing: frozenset[Outcome]) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=f"{result.case.number} {result.case.rule}")
    case.set("classname", f"conformance.{result.case.strength}")
    case.set("time", f"{result.seconds:.3f}")
    properties = ElementTree.SubElement(case, "properties")
    ElementTree.SubElement(properties, "property", name="case", value=result.case.number)
    text = "\n\n".join(map(_text, result.findings))
    if result.outcome == "skipped":
        ElementTree.SubElement(case, "skipped", message=f"needs {result.skipped}")
    elif result.outcome in failing:
        ElementTree.SubElement(case, "failure", message=_xml(result.findings[0].why)).text = text
    elif text:
        ElementTree.SubElement(case, "system-out").text = f"{result.outcome}: {text}"
    return case


def _described(result: Result) -> dict[str, Any]:
    return {
        "number": result.case.number,
        "rule": result.case.rule,
        "strength": str(result.case.strength),
        "clauses": [str(clause) for clause in result.case.clauses],
        "outcome": result.outcome,
        "skipped": result.skipped,
        "seconds": round(result.seconds, 3),
        "findings": [_facts(finding) for finding in result.findings],
    }


def _facts(finding: Finding) -> dict[str, str]:
    return {
        "clause": str(finding.clause),
        "sent": finding.exchange.sent,
        "got": finding.exchange.got,
        "why": finding.why,
    }


def _text(finding: Finding) -> str:
    facts = _facts(finding).items()
    return _xml("\n".join(f"{_SHOWN_AS.get(key, key)}: {text}" for key, text in facts if text))


def _xml(text: str) -> str:
    """XML cannot have the control characters that some cases send."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
