"""A real Prometheus that scrapes a daemon, and its HTTP API."""

import asyncio
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: crust-node
    static_configs: [{{targets: ["{address}"]}}]
"""


def compared(rules: Path) -> list[str]:
    """The expressions of the alerts in a file, without what each is compared with: they find series in health too."""
    text = rules.read_text()
    found = re.findall(r"^ +expr: (.*?) (?:==|<|>) (?:[\d.]+|ignoring.*)$", text, re.MULTILINE)
    assert len(found) == text.count("expr: ")
    return found


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


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
                found = await asyncio.to_thread(
                    ask, address, "query", query="count_over_time(up[1m])"
                )
            except OSError:  # it starts
                found = {"result": []}
            if found["result"] and int(found["result"][0]["value"][1]) >= times:
                return
            await asyncio.sleep(0.2)
