"""The arithmetic and the page of the benchmarks."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import figures, machine, page, plot

BASE = figures.Samples.of("ms", [float(number) for number in range(1, 101)])
TWICE = figures.Samples.of("ms", [2.0 * number for number in range(1, 101)])
REPORT = figures.Report(
    name="example",
    title="An example",
    method="A hundred times.",
    rows=(figures.Row("plain", BASE), figures.Row("wrapped", TWICE, "plain")),
    meaning="Wrapping costs.",
    goals=(figures.at_most("at most 60 ms", BASE.median, 60, "ms"),),
    if_missed="nobody waits for it",
    costs=(("memory", "1 MiB"),),
)


def test_percentile_is_a_value_that_was_measured() -> None:
    assert (BASE.median, BASE.p99) == (50.5, 99.0)
    assert figures.Samples.of("s", [3.0, 1.0]).p99 == 3.0


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        figures.Samples.of("ms", [])


def test_ratio_is_of_medians_and_a_baseline_has_none() -> None:
    assert [REPORT.ratio(row) for row in REPORT.rows] == [None, 2.0]


def test_missed_goal_is_not_met() -> None:
    assert REPORT.goals[0].met
    assert not figures.at_most("at most 50 ms", BASE.median, 50, "ms").met


def test_goals_need_a_sentence_for_a_miss() -> None:
    with pytest.raises(ValueError, match="what does a missed goal of example mean"):
        replace(REPORT, if_missed="")


def test_page_explains_missed_goals_and_lists_costs() -> None:
    missed = replace(REPORT, goals=(figures.at_most("at most 50 ms", BASE.median, 50, "ms"),))
    text = page.render(machine.describe(), [missed])
    assert "| at most 50 ms | 50.50 ms | **missed**: nobody waits for it |\n" in text
    assert f"{page.COSTS}\n| medians | |\n|---|--:|\n| memory | 1 MiB |\n" in text


def test_written_page_explains_missed_goals_and_lists_costs() -> None:
    text = (Path(page.__file__).parents[1] / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert page.COSTS in text
    assert "**missed** |" not in text


def test_section_row_has_median_percentile_and_ratio() -> None:
    assert page.section(REPORT).splitlines()[4:7] == [
        "| | median, ms | 99th percentile | ratio |",
        "|---|--:|--:|--:|",
        "| plain | 50.50 | 99.00 |  |",
    ]


def test_section_with_ways_has_a_column_for_each_way() -> None:
    rows = (figures.Row("Probe, plain", BASE), figures.Row("Probe, wrapped", TWICE, "Probe, plain"))
    report = replace(REPORT, rows=rows, ways=("plain", "wrapped"))
    assert page.section(report).splitlines()[4:7] == [
        "| median, 99th percentile, ratio; ms | plain | wrapped |",
        "|---|--:|--:|",
        "| Probe | 50.50, 99.00 | 101, 198, 2.00 |",
    ]


def test_equal_figures_give_an_equal_plot(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot.draw([REPORT], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "(2.00 times)" in (tmp_path / "one.svg").read_text()
