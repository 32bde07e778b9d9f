"""A real Prometheus scrapes a node: every expression of the alert rules and the dashboard finds series."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import prometheus
from tests.support.faults.refusals import refused
from tests.support.nodes.served_node import BlockNode
from tests.support.prometheus import DEPLOY, RULES

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]

OF_CONTROLLERS = ("crust_nodes_waiting_for_fencing", "crust_fencing_failures_total")
"""A node has none: tests/integration/ceph/claims/test_ended_clients.py."""
WITHOUT_PANEL = ("crust_background_failures_total", "crust_build_info", "crust_calls_unseen_total")


def compared(rules: Path) -> list[str]:
    """The expressions of the alerts in a file, without what each is compared with: they find series in health too."""
    text = rules.read_text()
    exprs = re.findall(r"^ +expr: (.*?) (?:==|<|>) (?:[\d.]+|ignoring.*)$", text, re.MULTILINE)
    assert len(exprs) == text.count("expr: ")
    return exprs


def found_by(address: str, expression: str) -> list[Any]:
    series: list[Any] = prometheus.ask(address, "query", query=expression)["result"]
    return series


def of_rules() -> list[str]:
    """Without the comparison, and without the codes and states of a trouble that this node does not have."""
    exprs = [expr for expr in compared(RULES) if not any(name in expr for name in OF_CONTROLLERS)]
    return [re.sub(r',? ?(grpc_status_code|state)=~?"[^"]*"', "", expr) for expr in exprs]


def of_dashboard() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "crust.json").read_text())
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(exprs) > 10
    variables = {"$driver": ".*", "$job": ".+", "$instance": ".+", "$__rate_interval": "1m"}
    for name, value in variables.items():
        exprs = [expr.replace(name, value) for expr in exprs]
    return exprs


async def test_expressions_of_rules_and_dashboard_find_series(
    chain: BlockNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await chain.published_volume()
    another = chain.publish("another", chain.places.target("two"))
    await refused(another, grpc.StatusCode.NOT_FOUND)
    async with prometheus.scraping_this_process(tmp_path, caplog, RULES) as address:
        await prometheus.scraped_often(address)
        empty = [
            expr
            for expr in (*of_rules(), *of_dashboard(), *WITHOUT_PANEL)
            if not (await asyncio.to_thread(found_by, address, expr))
        ]
    assert empty == []
