"""A daemon that does not answer is reported with what to do."""

import os
import socket

from tests.support.nodes.commands import invoked
from tests.support.nodes.places import Places


async def test_silent_proxy_is_reported_with_advice(places: Places) -> None:
    os.mkdir(places.run)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(places.sockets.inspect)
    for command, run_dir, code, says in (
        ("status", places.root, 3, "the socket does not exist; start crust-node or crust-proxy"),
        ("volumes", places.run, 3, "the socket is stale"),
        ("status", "relative", 2, "it is not absolute"),
    ):
        result = await invoked(command, "--run-dir", run_dir)
        assert (result.exit_code, says in result.output) == (code, True), result.output
