"""deploy/grafana: each panel says what it means, and is of the instances that were chosen."""

import json
import re
from collections import Counter

import pytest
import yaml

from tests.support import chart

DASHBOARD = json.loads((chart.CHECKOUT / "deploy/grafana/crust.json").read_text(encoding="utf-8"))
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
METRIC = re.compile(r"\b((?:crust|csi|process)_\w+|up)\b(\{[^}]*\})?")


@pytest.mark.parametrize("title", PANELS)
def test_panel_selects_instances_and_says_what_it_means(title: str) -> None:
    """On 100 nodes a panel without a selection has hundreds of lines."""
    panel = PANELS[title]
    assert panel["description"].endswith(".")
    is_stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    assert title.endswith(" (stacked)") is is_stacked
    for target in panel["targets"]:
        selected = [selector for _, selector in METRIC.findall(target["expr"])]
        assert selected
        chosen = 'job=~"$job", instance=~"$instance"'
        assert [each for each in selected if not each.startswith(f"{{{chosen}")] == []


def test_variables_and_places_of_panels_are_whole() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    expressions = json.dumps([panel["targets"] for panel in PANELS.values()])
    used = set(re.findall(r"\$(\w+)", expressions)) - {"__rate_interval"}
    assert variables == used | {"source"}
    places = Counter((p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"])
    assert len(places) == len(PANELS) == len(DASHBOARD["panels"])
    assert [p["id"] for p in DASHBOARD["panels"]] == list(range(1, len(PANELS) + 1))


def test_alerts_that_panels_name_exist() -> None:
    text = (chart.CHART / "files/crust-rules.yaml").read_text(encoding="utf-8")
    (group,) = yaml.safe_load(text)["groups"]
    alerts = {rule["alert"] for rule in group["rules"]}
    named = set(re.findall(r"\bCrust[A-Z]\w+", json.dumps([*PANELS.values()])))
    assert named
    assert named <= alerts


def test_trouble_of_a_node_has_its_panel() -> None:
    shown = " ".join(t["expr"] for panel in PANELS.values() for t in panel["targets"])
    wanted = (
        "up",
        "crust_problems",
        "crust_pool_open",
        "crust_worker_threads",
        "crust_volumes_abnormal",
    )
    assert [name for name in wanted if not re.search(rf"\b{name}\b", shown)] == []
