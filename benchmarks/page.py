"""The page: Markdown with a table per benchmark, the goals and whether they are met, and the measured machine."""

from collections.abc import Sequence

from benchmarks import figures, machine

_INTRO = """# Benchmarks

Written by `make bench`; do not edit. Alternatives were measured together, in rounds (A, B, A, B …), so read the
ratios first: absolute times depend on the machine below, and 99th percentiles also on its other load. A ratio is the
median divided by the median of the row that it is compared with.
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
    lines = [f"## {report.title}", "", report.method, "", *_table(report), "", report.meaning, ""]
    return "\n".join(lines)


def _machine(described: machine.Description) -> str:
    return (
        f"Machine: {described.cores} cores ({described.processor}), {described.memory_gib} GiB, Linux "
        f"{described.kernel}; Python {described.python}, grpcio {described.grpc}; measured on {described.taken_on}.\n"
    )


def _goals(reports: Sequence[figures.Report]) -> str:
    lines = ["## Goals", "", "| goal | found | |", "|---|---|---|"]
    lines += [
        f"| {goal.aim} | {goal.found} | {'met' if goal.met else '**missed**'} |"
        for report in reports
        for goal in report.goals
    ]
    return "\n".join([*lines, ""])


def _table(report: figures.Report) -> list[str]:
    lines = ["| | count | median | 99th percentile | ratio |", "|---|--:|--:|--:|--:|"]
    for row in report.rows:
        each, ratio = row.samples, report.ratio(row)
        shown = "" if ratio is None else f"{ratio:.2f}"
        lines.append(
            f"| {row.label} | {each.count} | {figures.shown(each.median)} {each.unit} "
            f"| {figures.shown(each.p99)} {each.unit} | {shown} |"
        )
    return lines
