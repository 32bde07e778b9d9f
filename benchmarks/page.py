"""The page: Markdown with a table per benchmark, the goals and whether they are met, and the measured machine."""

from collections import Counter
from collections.abc import Sequence

from benchmarks import figures, machine

_INTRO = """# Benchmarks

Written by `make bench`; do not edit. Alternatives were measured in turn, so read the ratios first: times depend on
the machine, 99th percentiles also on its other load. A ratio compares a median with the base: the median
that has no ratio, in the same row or else in the same table.
"""


COSTS = """## What crust costs a node

A daemon that runs as root, or a privileged pod ([security.md](security.md)); Python 3.11 or newer with the
packages of [requirements.txt](../deploy/requirements.txt); and for crust's own driver a pool whose records only crust
reads, beside images that are plain files.
"""


def render(described: machine.Description, reports: Sequence[figures.Report]) -> str:
    """The whole page."""
    parts = [
        _INTRO,
        _machine(described),
        _costs(reports),
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


def _costs(reports: Sequence[figures.Report]) -> str:
    rows = [f"| {what} | {value} |" for report in reports for what, value in report.costs]
    return "\n".join((COSTS, "| medians | |", "|---|--:|", *rows, ""))


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
        f"| {goal.aim} | {goal.found} | {'met' if goal.met else f'**missed**: {report.if_missed}'} |"
        for report in reports
        for goal in report.goals
    ]
    return "\n".join([*lines, ""])


def _table(report: figures.Report) -> list[str]:
    """The head has the unit of most rows; a value in another one has its own."""
    unit, _ = Counter(row.samples.unit for row in report.rows).most_common(1)[0]
    if report.ways:
        return _by_way(report, unit)
    lines = [f"| | median, {unit} | 99th percentile | ratio |", "|---|--:|--:|--:|"]
    lines += [f"| {row.label} | {' | '.join(_values(report, row, unit))} |" for row in report.rows]
    return lines


def _by_way(report: figures.Report, unit: str) -> list[str]:
    """A row for each measured thing, and in a cell its median, 99th percentile and ratio."""
    cells: dict[str, dict[str, str]] = {}
    for row in report.rows:
        way = max(filter(row.label.endswith, report.ways), key=len)
        measured = row.label.removesuffix(way).rstrip(" ,:")
        cells.setdefault(measured, {})[way] = ", ".join(filter(None, _values(report, row, unit)))
    head = f"median, 99th percentile, ratio; {unit}"
    lines = [f"| {' | '.join((head, *report.ways))} |", "|---" + "|--:" * len(report.ways) + "|"]
    for measured, by_way in cells.items():
        lines.append(f"| {measured} | {' | '.join(by_way.get(way, '') for way in report.ways)} |")
    return lines


def _values(report: figures.Report, row: figures.Row, unit: str) -> tuple[str, str, str]:
    ratio, own = report.ratio(row), "" if row.samples.unit == unit else f" {row.samples.unit}"
    median, p99 = (figures.shown(value) + own for value in (row.samples.median, row.samples.p99))
    return median, p99, "" if ratio is None else f"{ratio:.2f}"
