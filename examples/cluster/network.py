"""Hosts of a cluster on one machine: a network namespace each, joined by a bridge in the namespace of the services.

    services   10.213.0.1    Ceph and the controller of its driver; has the bridge
    <node>     10.213.0.11…  proxy, runtime handler, driver

A host is cut by taking the bridge's end of its link down: nothing of it reaches anybody then, while its processes and
guests go on. Sockets of the filesystem work across namespaces, so the caller of the demo needs none of its own. The
machine's own network is not touched. Needs root, and a private mount namespace, in which the namespaces are mounted
on files of a directory of this network alone: /run/netns is one of the machine.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pyroute2 import NetNS, netns

from crust.host.mounts import mount_api

_NETWORK = "10.213.0"
_PREFIX_LENGTH = 24
_BRIDGE = "br0"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one address. `namespace` is the file on which it is mounted."""

    name: str
    namespace: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """A command line that runs the given one in the host's network, with the caller's mounts."""
        return ("nsenter", f"--net={self.namespace}", "--", *arguments)


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts; `services` is never cut. Any process of the machine may hold one."""

    services: Host
    nodes: tuple[Host, ...]

    @classmethod
    def of(cls, directory: str, names: Iterable[str]) -> "Network":
        """The network whose namespaces are in the directory; it may not exist yet."""
        nodes = tuple(
            Host(name, f"{directory}/{name}", f"{_NETWORK}.{number}")
            for number, name in enumerate(names, 11)
        )
        return cls(Host("services", f"{directory}/services", f"{_NETWORK}.1"), nodes)

    async def cut(self, node: Host) -> None:
        """Take the node's link down; cut already is a success."""
        await self._set(node, "down")

    async def join(self, node: Host) -> None:
        """Bring the node's link up again."""
        await self._set(node, "up")

    async def _set(self, node: Host, state: str) -> None:
        # In a process of its own: netlink's library has an event loop, and forks to enter a namespace.
        command = (
            sys.executable,
            "-m",
            "examples.cluster.network",
            self.services.namespace,
            node.name,
            state,
        )
        process = await asyncio.create_subprocess_exec(*command)
        if code := await process.wait():
            raise subprocess.CalledProcessError(code, command)


@contextmanager
def running(*names: str) -> Iterator[Network]:
    """A network of hosts of these names (11 characters at most) while the block runs; nothing of it stays after."""
    with ExitStack() as stack:
        network = Network.of(stack.enter_context(_directory()), names)
        hub = _namespace(stack, network.services)
        hub.link("add", ifname=_BRIDGE, kind="bridge")
        _address(hub, _BRIDGE, network.services.address)
        for node in network.nodes:
            _join(stack, hub, node)
        yield network


@contextmanager
def _directory() -> Iterator[str]:
    """A filesystem of its own, which goes with the mount namespace if this process is killed."""
    made = tempfile.mkdtemp(prefix="crust-net-")
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", made], check=True)
        try:
            yield made
        finally:
            mount_api.unmount_one(made)
    finally:
        os.rmdir(made)


def _join(stack: ExitStack, hub: NetNS, node: Host) -> None:
    """A pair of links: one end is a port of the bridge, the other the node's only interface."""
    inside = _namespace(stack, node)
    peer = {"ifname": "eth0", "net_ns_fd": node.namespace}
    hub.link("add", ifname=_port(node.name), kind="veth", peer=peer)
    (port,) = hub.link_lookup(ifname=_port(node.name))
    (bridge,) = hub.link_lookup(ifname=_BRIDGE)
    hub.link("set", index=port, master=bridge, state="up")
    _address(inside, "eth0", node.address)


def _namespace(stack: ExitStack, host: Host) -> NetNS:
    netns.create(host.namespace)
    stack.callback(netns.remove, host.namespace)
    inside = stack.enter_context(NetNS(host.namespace))
    (loopback,) = inside.link_lookup(ifname="lo")
    inside.link("set", index=loopback, state="up")
    return inside


def _address(inside: NetNS, interface: str, address: str) -> None:
    (index,) = inside.link_lookup(ifname=interface)
    inside.addr("add", index=index, address=address, prefixlen=_PREFIX_LENGTH)
    inside.link("set", index=index, state="up")


def _port(name: str) -> str:
    return f"v-{name}"


def _set_port(namespace: str, name: str, state: str) -> None:
    with NetNS(namespace, flags=0) as hub:
        (index,) = hub.link_lookup(ifname=_port(name))
        hub.link("set", index=index, state=state)


if __name__ == "__main__":
    _set_port(*sys.argv[1:])
