"""The output of a run: a line for each case that ran, below it the broken clauses, and a summary.

A skipped case has no line; the summary has one for each reason. The reports for machines are JUnit XML, which has a
failure only for a finding that fails the run, and JSON with all facts.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from crust_conformance.results import Finding, Outcome, Result, Results

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
    """Prints to stdout during the run, unless it is `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def result(self, result: Result) -> None:
        """Print the result of a case."""
        if result.outcome == "skipped":
            return
        word = click.style(f"{result.outcome:<8}", fg=_COLORS[result.outcome])
        self._line(f"{result.case.number} {word} {result.case.rule}")
        for finding in result.findings:
            self._finding(finding)

    def remark(self, text: str) -> None:
        """Print a remark about the whole run."""
        self._line(f"{click.style('note', bold=True)}: {text}")

    def summary(self, results: Results, *, strict: bool) -> None:
        """Print the skipped cases by reason, the broken ones by outcome, and the number of each outcome."""
        reasons = defaultdict[str, list[str]](list)
        for number, reason in results.skipped.items():
            reasons[reason].append(number)
        if reasons:
            self._line("")
            self._line("skipped, because the subject has not, or was not given:")
        for reason, numbers in sorted(reasons.items(), key=lambda item: -len(item[1])):
            self._line(f"  {len(numbers):>3} {reason}: {_ranges(numbers)}")
        for outcome, meaning in _MEANING:
            self._broken(results, outcome, meaning)
        counts = [f"{len(results.numbers(color))} {color}" for color in _COLORS]
        self._line("")
        self._line(", ".join(counts) + ("" if not strict else "; strict: all but passed ones fail"))

    def _broken(self, results: Results, outcome: Outcome, meaning: str) -> None:
        broken = [result for result in results.cases if result.outcome == outcome]
        if broken:
            self._line("")
            self._line(f"{click.style(outcome, fg=_COLORS[outcome])}: {meaning}")
        for result in broken:
            self._line(f"  {result.case.number} {result.case.rule}")

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
    failures = sum(result.outcome in failing for result in results.cases)
    skipped = sum(result.outcome == "skipped" for result in results.cases)
    suite = ElementTree.Element("testsuite", name="crust-conformance", errors="0")
    suite.set("tests", str(len(results.cases)))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    suite.set("time", f"{sum(result.seconds for result in results.cases):.3f}")
    for result in results.cases:
        suite.append(_testcase(result, failing))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def write_json(path: Path, results: Results) -> None:
    """Write every case with its clauses and findings."""
    cases = [_described(result) for result in results.cases]
    document = {"exit_code": results.exit_code, "cases": cases}
    path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


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
    """Replace control characters, which some cases send and XML cannot contain."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
