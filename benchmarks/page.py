"""The page: Markdown with a table per benchmark, the goals and whether they are met, and the measured machine."""

from collections import Counter
from collections.abc import Sequence

from benchmarks import figures, machine

_INTRO = """# Benchmarks

Written by `make bench`; do not edit. Alternatives were measured in turn, so read the ratios first: times depend on
the machine, 99th percentiles also on its other load. A ratio is the median over that of the row without one.
"""


def render(described: machine.Description, reports: Sequence[figures.Report]) -> str:
    """The whole page."""
    parts = [
        _INTRO,
        _machine(described),
        _goals(reports),
        "![Medians and 99th percentiles](benchmarks.svg)\n",
        *map(section, reports),
    ]
    return "\n".join(parts)


def section(report: figures.Report) -> str:
    """One benchmark."""
    paragraphs = (report.method, "\n".join(_table(report)), report.meaning)
    return "\n\n".join((f"## {report.title}", *filter(None, paragraphs))) + "\n"


def _machine(described: machine.Description) -> str:
    return (
        f"Machine: {described.cores} cores ({described.processor}), {described.memory_gib} GiB, Linux "
        f"{described.kernel}; Python {described.python}, grpcio {described.grpc}; measured on {described.taken_on}.\n"
    )


def _goals(reports: Sequence[figures.Report]) -> str:
    lines = [
        "## Goals",
        "",
        "Of medians, where a goal does not say otherwise.",
        "",
        "| goal | found | |",
        "|---|---|---|",
    ]
    lines += [
        f"| {goal.aim} | {goal.found} | {'met' if goal.met else '**missed**'} |"
        for report in reports
        for goal in report.goals
    ]
    return "\n".join([*lines, ""])


def _table(report: figures.Report) -> list[str]:
    """The head has the unit of most rows; a value in another one has its own."""
    unit, _ = Counter(row.samples.unit for row in report.rows).most_common(1)[0]
    lines = [f"| | median, {unit} | 99th percentile | ratio |", "|---|--:|--:|--:|"]
    for row in report.rows:
        ratio, own = report.ratio(row), "" if row.samples.unit == unit else f" {row.samples.unit}"
        values = f"{figures.shown(row.samples.median)}{own} | {figures.shown(row.samples.p99)}{own}"
        lines.append(f"| {row.label} | {values} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return lines
