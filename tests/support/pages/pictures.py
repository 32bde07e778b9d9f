"""docs/dashboard.png and docs/alerts.png: `make docs-pictures`.

The numbers are real: a `crust node`, scraped by a real Prometheus (`monitored_node`). The dashboard's panels are read
from deploy/grafana and asked of that Prometheus, panel by panel, as Grafana would; Grafana itself is no package of
Debian, so matplotlib draws them.
"""

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tests.support.nodes.monitored_node import FOR, Monitored, seen
from tests.support.pages import prometheus

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "crust.json"
COLOURS = {"inactive": "#d9ead3", "pending": "#f6b26b", "firing": "#cc0000"}
_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def dashboard(monitored: Monitored) -> Figure:
    """Each panel of the dashboard, where its JSON places it."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    figure = Figure(figsize=(14, rows * 0.36), layout="constrained")
    grid = figure.add_gridspec(rows, 24)
    for panel in panels:
        at = panel["gridPos"]
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]])
        _draw(axes, panel, monitored)
    figure.suptitle(
        "deploy/grafana/crust.json, drawn by matplotlib from a Prometheus that scraped a crust node"
    )
    return figure


def _draw(axes: Axes, panel: dict[str, Any], monitored: Monitored) -> None:
    top = 0.0
    below: dict[float, float] = {}
    for target in panel["targets"]:
        for series in _range(monitored, target["expr"]):
            points = [(float(at) - monitored.began_s, float(y)) for at, y in series["values"]]
            label = _label(target["legendFormat"], series["metric"])
            if "custom" in panel["fieldConfig"]["defaults"]:  # each series upon those before it
                points = [(at, y + below.get(at, 0.0)) for at, y in points]
                below |= points
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
            top = max(top, *(y for _, y in points))
    axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
    axes.set_ylim(0, 1.5 * top or 1)  # above the lines is the legend
    axes.set_xlim(0, monitored.ended_s - monitored.began_s)
    axes.set_xlabel("seconds", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.3)
    if panel["fieldConfig"]["defaults"]["unit"] == "bytes":
        axes.yaxis.set_major_formatter(FuncFormatter(_bytes))
    if axes.lines:
        axes.legend(fontsize=5.5, loc="upper left", ncols=2, framealpha=0.7)


def _range(monitored: Monitored, expression: str) -> list[dict[str, Any]]:
    asked = expression.replace("$driver", ".*").replace("$__rate_interval", "10s")
    found: list[dict[str, Any]] = prometheus.ask(
        monitored.address,
        "query_range",
        query=asked,
        start=monitored.began_s,
        end=monitored.ended_s,
        step=1,
    )["result"]
    return found


def _label(legend: str, labels: dict[str, str]) -> str:
    return _short(re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend))


def _short(label: str) -> str:
    """Without the service of a method and the port of an instance, which are the same everywhere here."""
    return re.sub(r"127\.0\.0\.1:\d+", "node-1", label.replace("/csi.v1.", "")).strip()


def _bytes(value: float, _: object) -> str:
    return next(
        (f"{value / size:.3g} {unit}" for unit, size in _BYTES if value >= size), f"{value:g}"
    )


def alerts(monitored: Monitored) -> Figure:
    """Each rule over the time: inactive, pending, firing; below, what the alerts say to whoever is called."""
    groups = prometheus.ask(monitored.address, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    figure = Figure(figsize=(14, 0.32 * len(rules) + 2.2), layout="constrained")
    axes = figure.add_subplot()
    length_s = monitored.ended_s - monitored.began_s
    for row, rule in enumerate(rules):
        axes.broken_barh([(0, length_s)], (row - 0.4, 0.8), facecolors=COLOURS["inactive"])
        for series in _range(monitored, f'ALERTS{{alertname="{rule["name"]}"}}'):
            spans = [(float(at) - monitored.began_s, 1.0) for at, _ in series["values"]]
            colour = COLOURS[series["metric"]["alertstate"]]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour)
    names = [f"{each['name']} ({each['labels']['severity']})" for each in rules]
    axes.set_yticks(range(len(rules)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, length_s)
    axes.set_xlabel(f"seconds; every `for` of the rules is {FOR} here", fontsize=8)
    axes.set_title("inactive (green), pending (orange), firing (red)", fontsize=9, loc="left")
    said = [
        f"{alert['labels']['alertname']}: {_short(alert['annotations']['summary'])}\n"
        f"    {alert['annotations']['action']}"
        for rule in rules
        for alert in rule["alerts"]
    ]
    figure.supxlabel("\n".join(said), fontsize=8, x=0.01, ha="left", family="monospace")
    return figure


async def _main(into: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cp-", dir="/tmp") as base:
        async with seen(Path(base)) as monitored:
            for name, draw in (("dashboard", dashboard), ("alerts", alerts)):
                figure = await asyncio.to_thread(draw, monitored)
                figure.savefig(into / f"{name}.png", dpi=90)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
