"""examples.cluster.network on real network namespaces: a cut host reaches nobody, and nothing stays."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.cluster import network

pytestmark = pytest.mark.root

_LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].close()
"""
_NETWORK = """
import sys
from examples.cluster import network
with network.running("a") as made:
    print(made.services.namespace, flush=True)
    sys.stdin.read()
"""
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
except OSError:
    sys.exit(3)
"""


def reaches(host: network.Host, address: str, port: int) -> bool:
    command = host.command(sys.executable, "-c", _CONNECT, address, str(port))
    code = subprocess.run(command, check=False).returncode
    assert code in (0, 3)
    return code == 0


@contextmanager
def listening(host: network.Host) -> Iterator[int]:
    command = host.command(sys.executable, "-c", _LISTEN, host.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@contextmanager
def alone() -> Iterator[Any]:
    """A process that has a network, in a mount namespace of its own as the demo, until its input ends."""
    command = ("unshare", "--mount", "--propagation", "private", sys.executable, "-c", _NETWORK)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_cut_host_reaches_nobody_until_it_has_joined_again() -> None:
    with network.running("a", "b") as net, listening(net.services) as port:
        a, b = net.nodes
        assert reaches(a, net.services.address, port)
        asyncio.run(net.cut(a))
        asyncio.run(net.cut(a))
        assert not reaches(a, net.services.address, port)
        assert reaches(b, net.services.address, port)
        asyncio.run(net.join(a))
        assert reaches(a, net.services.address, port)


def test_the_hosts_network_is_neither_seen_nor_changed() -> None:
    before = {name for _, name in socket.if_nameindex()}
    with socket.create_server(("127.0.0.1", 0)) as outside, network.running("a") as net:
        assert {name for _, name in socket.if_nameindex()} == before
        assert not reaches(net.nodes[0], "127.0.0.1", outside.getsockname()[1])


def test_no_namespace_stays_after_a_failure() -> None:
    with pytest.raises(RuntimeError), network.running("a", "b") as made:
        raise RuntimeError
    assert not Path(made.services.namespace).parent.exists()


def test_end_of_a_network_leaves_another_one() -> None:
    with alone() as first, alone() as second:
        name = first.stdout.readline().strip()
        others = second.stdout.readline().strip()
        first.communicate()
        assert not Path(name).parent.exists()
        assert Path(f"/proc/{second.pid}/root{others}").exists()


def test_killed_network_leaves_no_name() -> None:
    with alone() as process:
        name = process.stdout.readline().strip()
        assert name
        process.kill()
    assert not Path(name).exists()
    Path(name).parent.rmdir()
