"""A real Prometheus scrapes a node: every expression of the alert rules and the dashboard finds series."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.cli.programs import monitoring
from tests.integration.chain.conftest import Chain
from tests.support.faults.refusals import refused
from tests.support.pages import prometheus

pytestmark = [pytest.mark.root, pytest.mark.parametrize("chain", ["node"], indirect=True)]

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = DEPLOY / "prometheus" / "crust-rules.yaml"


OF_CONTROLLERS = ("crust_nodes_waiting_for_fencing", "crust_fencing_failures_total")
"""A node has none: tests/integration/ceph/claims/test_lost_nodes.py."""
WITHOUT_PANEL = (
    "crust_snapshots", "crust_worker_threads", "crust_worker_calls_waiting", "crust_background_failures_total",
    "crust_pool_open", "crust_build_info",
)  # fmt: skip


def found_by(address: str, expression: str) -> list[Any]:
    found: list[Any] = prometheus.ask(address, "query", query=expression)["result"]
    return found


def of_rules() -> list[str]:
    """Without the comparison, and without the codes and states of a trouble that this node does not have."""
    found = [
        each
        for each in prometheus.compared(RULES)
        if not any(name in each for name in OF_CONTROLLERS)
    ]
    return [re.sub(r',? ?(grpc_status_code|state)=~?"[^"]*"', "", each) for each in found]


def of_dashboard() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "crust.json").read_text())
    found = [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    assert len(found) > 10
    return [each.replace("$driver", ".*").replace("$__rate_interval", "1m") for each in found]


async def test_expressions_of_rules_and_dashboard_find_series(
    chain: Chain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await chain.published_volume()
    another = chain.publish("another", chain.places.target("two"))
    await refused(another, grpc.StatusCode.NOT_FOUND)
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(each) for each in caplog.records if each.msg == "metrics"]
        async with prometheus.scraping(tmp_path, line["address"], RULES) as address:
            await prometheus.scraped_often(address)
            empty = [
                each
                for each in (*of_rules(), *of_dashboard(), *WITHOUT_PANEL)
                if not (await asyncio.to_thread(found_by, address, each))
            ]
    assert empty == []
