"""A real Prometheus with crust's rules, beside a daemon that it scrapes. Rules' times are promtool's to test."""

import asyncio
import json
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from crust.cli.programs import monitoring

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "helm" / "crust" / "files" / "crust-rules.yaml"
CONFIG = """\
global: {{scrape_interval: 250ms, evaluation_interval: 250ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: pods
    static_configs: [{{targets: ["{address}"]}}]
"""


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def quick_rules(directory: Path) -> Path:
    """The rules, their times one second each."""
    rules = directory / "rules.yaml"
    rules.write_text(re.sub(r"for: \d+m", "for: 1s", RULES.read_text()))
    return rules


@asynccontextmanager
async def scraping(directory: Path, scraped: str, rules: Path) -> AsyncIterator[str]:
    """The URL of a Prometheus that keeps its files in `directory`, while the block runs."""
    config, address = directory / "prometheus.yml", f"127.0.0.1:{free_port()}"
    config.write_text(CONFIG.format(rules=rules, address=scraped))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def scraping_this_process(
    directory: Path, caplog: pytest.LogCaptureFixture, rules: Path
) -> AsyncIterator[str]:
    """The URL of a Prometheus that reads this process' metrics, while the block runs."""
    caplog.set_level(logging.INFO)
    with monitoring.serving("127.0.0.1:0"):
        (line,) = [vars(record) for record in caplog.records if record.msg == "metrics"]
        async with scraping(directory, line["address"], rules) as address:
            yield address


def ask(address: str, path: str, **query: object) -> Any:
    """The data of an answer of the API, e.g. `ask(address, "query", query="up")`. Raises OSError while it starts."""
    asked = urllib.parse.urlencode(query)
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{asked}", timeout=10) as answer:
        return json.load(answer)["data"]


async def scraped_often(address: str, times: int = 3) -> None:
    """A rate needs two samples. There is nothing to wait on but its answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await asyncio.to_thread(
                    ask, address, "query", query="count_over_time(crust_build_info[1m])"
                )
            except OSError:  # it starts
                answer = {"result": []}
            if answer["result"] and int(answer["result"][0]["value"][1]) >= times:
                return
            await asyncio.sleep(0.2)


async def firing(address: str, alert: str) -> dict[str, str] | None:
    """The labels of the alert, if it fires."""
    with suppress(OSError):  # it starts
        for found in (await asyncio.to_thread(ask, address, "alerts"))["alerts"]:
            if found["state"] == "firing" and found["labels"]["alertname"] == alert:
                labels: dict[str, str] = found["labels"]
                return labels
    return None


async def fires(address: str, alert: str) -> dict[str, str]:
    """The labels of the alert, as soon as it fires. There is nothing to wait on but Prometheus' answers."""
    async with asyncio.timeout(60):
        while True:
            if labels := await firing(address, alert):
                return labels
            await asyncio.sleep(0.2)
