"""What a run prints: a line for each case that ran, below it what was broken, and a summary.

A skipped case has no line; the summary has one for each reason.
"""

import os
from collections import defaultdict
from collections.abc import Iterable

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
        for each in result.findings:
            self._finding(each)

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
        counts = [f"{len(results.numbers(each))} {each}" for each in _COLORS]
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
        self._named("clause", str(finding.clause))
        self._named("sent", finding.exchange.sent)
        self._named("got", finding.exchange.got)
        self._named("but", finding.why)

    def _named(self, name: str, text: str) -> None:
        if not text:
            return
        first, *others = text.splitlines()
        self._line(f"{_INDENT}{name:<7}{first}")
        for each in others:
            self._line(f"{_INDENT}{'':<7}{each}")

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
