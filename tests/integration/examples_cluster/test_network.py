"""examples.cluster.network on real network namespaces: a cut host reaches nobody, and nothing stays."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
import signal
from examples.cluster import network
with network.running("a") as made:
    print(made.services.namespace, flush=True)
    signal.pause()
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
    mark = made.services.namespace.removesuffix("services")
    assert not list(Path("/run/netns").glob(f"{mark}*"))


def test_killed_network_leaves_no_name() -> None:
    private = ("unshare", "--mount", "--propagation", "private")
    command = (*private, sys.executable, "-c", _NETWORK)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert name
        process.kill()
    assert not Path("/run/netns", name).exists()
