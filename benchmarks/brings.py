"""The README's picture: four bars, how much longer a workload waits at a shared mount than at the block device.

The figures are those of docs/benchmarks.md, from which `python -m benchmarks.brings` draws it anew.
"""

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

_DOCS = Path(__file__).parents[1] / "docs"
PICTURE = _DOCS / "brings.svg"
_COLOUR = "#2f6fb0"
_LABELS = {
    "create": "create a small file",
    "stat": "stat a file",
    "unlink": "remove a file",
    "synced 4 KiB write": "synced 4 KiB write",
}
_TITLE = (
    "A share of a host mount (virtio-fs) takes so many times as long\nas the volume's block device in the guest. "
    "Measured under software emulation (TCG)."
)


def ratios() -> dict[str, float]:
    """What the page says of virtio-fs, by the kind of call."""
    text = (_DOCS / "benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("## A volume's filesystem, seen from a workload")[2].partition(
        "\n## "
    )[0]
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]*, ([\d.]+) \|$", section, re.MULTILINE
    )
    return {name: float(ratio) for name, ratio in rows}


def draw() -> None:
    """Write the picture. Equal figures give equal bytes."""
    found = ratios()
    with mpl.rc_context({"svg.hashsalt": "crust", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.5, 2.2), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh([*_LABELS.values()], [found[name] for name in _LABELS], color=_COLOUR)
        axes.bar_label(bars, [f"{found[name]:.1f} times" for name in _LABELS], padding=4)
        axes.axvline(1, color="#333333", linewidth=1)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(_TITLE, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
