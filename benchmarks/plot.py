"""The plot: one panel per benchmark and unit, a bar per row up to the median, a line on to the 99th percentile."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import figures

_CRUST, _OTHER, _LINE = "#2f6fb0", "#8a8f98", "#333333"
_BAR_INCHES, _PANEL_INCHES = 0.32, 0.8
_LEGEND = "bar: median; line: to the 99th percentile; blue: crust, grey: what it is compared with"


def draw(reports: Sequence[figures.Report], path: Path) -> None:
    """Write the plot of all reports; the suffix of `path` decides the format. Equal figures give equal bytes."""
    panels = [
        (report, unit)
        for report in reports
        for unit in dict.fromkeys(row.samples.unit for row in report.rows)
    ]
    bars = [sum(row.samples.unit == unit for row in report.rows) for report, unit in panels]
    height = sum(count * _BAR_INCHES + _PANEL_INCHES for count in bars)
    with mpl.rc_context({"svg.hashsalt": "crust", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, height), layout="constrained")
        figure.suptitle(_LEGEND, fontsize=9)
        figure.subplots(len(panels), 1, height_ratios=[count + 1.5 for count in bars])
        for axes, (report, unit) in zip(figure.axes, panels, strict=True):
            _panel(axes, report, unit)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, report: figures.Report, unit: figures.Unit) -> None:
    rows = [row for row in report.rows if row.samples.unit == unit]
    for place, row in enumerate(rows):
        samples = row.samples
        axes.barh(place, samples.median, color=_OTHER if row.is_other else _CRUST, height=0.6)
        axes.plot([samples.median, samples.p99], [place, place], color=_LINE, linewidth=1)
        axes.plot([samples.p99], [place], color=_LINE, marker="|")
        axes.annotate(
            _label(report, row),
            (samples.p99, place),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_title(f"{report.title} ({unit})", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _label(report: figures.Report, row: figures.Row) -> str:
    ratio = report.ratio(row)
    shown = figures.shown(row.samples.median)
    return shown if ratio is None else f"{shown}  ({ratio:.2f} times)"
