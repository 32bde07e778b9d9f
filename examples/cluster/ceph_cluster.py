"""A small Ceph cluster: one monitor or three and one OSD (and a manager where capacity is asked for) at one address.

Everything lies below one directory; nothing in /etc/ceph is read. The daemons stay in the foreground, as children
that the kernel kills with the process that started them (`setpriv --pdeathsig`), so neither a pid file nor a socket
can outlive them and name another process later. Clients have no admin socket.

Two stores: memstore starts in two seconds and loses everything when the OSD ends; bluestore keeps it and takes eight.
A single OSD that is frozen for longer than its heartbeat grace never becomes readable again, so the grace is long.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from examples.cluster import freezing

Store = Literal["memstore", "bluestore"]
Monitors = Literal[1, 3]
POOL = "rbd"
_PORTS = 100
_START_S = 300
"""Only a start that hangs reaches it."""

_CONF = """\
[global]
fsid = {fsid}
mon host = {monitors}
public addr = {host}
cluster addr = {host}
ms bind port min = {first_port}
ms bind port max = {last_port}
ms bind ipv6 = false
run dir = {directory}
admin socket = {directory}/$name.asok
pid file =
log file = {directory}/$name.log
mon cluster log file = {directory}/cluster.log
keyring = {directory}/keyring
mon data = {directory}/mon.$id
osd data = {directory}/osd
mgr data = {directory}/mgr
osd objectstore = {store}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class update on start = false
osd memory target = 939524096
bluestore block size = 21474836480
memstore device bytes = 21474836480
mon allow pool size one = true
mon allow pool delete = true
mon max pg per osd = 4000
mon warn on pool no redundancy = false
auth allow insecure global id reclaim = false
[mon]
# The default, 1 s, paces monitors under load: here each snapshot and each key would wait for it.
paxos propose interval = 0.05
osd heartbeat grace = 600
[osd]
osd heartbeat grace = 600
[client]
admin socket =
log file =
"""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon of the cluster, which is a child of this process."""

    name: str
    process: "subprocess.Popen[bytes]"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it while the block runs: peers see a machine that hangs."""
        freezing.freeze(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it, and wait for that."""
        self.process.send_signal(number)
        try:
            self.process.wait(timeout=_START_S)
        finally:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class CephCluster:
    """A running cluster with the pool `rbd`, and its administrator."""

    directory: Path
    fsid: str
    first_port: int
    store: Store
    host: str = "127.0.0.1"
    """The address of all daemons."""
    count: Monitors = 1
    """How many monitors: one, or three, of which two are enough."""
    keys: dict[str, str] = field(default_factory=dict)
    daemons: dict[str, Daemon] = field(default_factory=dict)
    _admin: Any = None

    @property
    def monitors(self) -> str:
        """`mon_host`, with the protocols: without them a wrong key would be retried instead of refused."""
        return ",".join(self._addresses().values())

    def _addresses(self) -> dict[str, str]:
        ports = {name: self.first_port + 2 * i for i, name in enumerate("abc"[: self.count])}
        return {
            name: f"[v2:{self.host}:{port},v1:{self.host}:{port + 1}]"
            for name, port in ports.items()
        }

    @property
    def conf(self) -> Path:
        """The configuration file of the daemons, and of `ceph` and `rbd` by CEPH_CONF."""
        return self.directory / "ceph.conf"

    @property
    def mon(self) -> Daemon:
        """The first monitor."""
        return self.daemons["mon.a"]

    @property
    def osd(self) -> Daemon:
        """The OSD."""
        return self.daemons["osd"]

    @property
    def admin(self) -> Any:
        """The administrator's connection (rados.Rados)."""
        if self._admin is None:
            self._admin = self.connected("admin", self.keys["client.admin"])
        return self._admin

    def command(self, prefix: str, **arguments: object) -> bytes:
        """A command of the administrator to the monitors; its output."""
        words = json.dumps({"prefix": prefix, **arguments})
        number, output, text = self.admin.mon_command(words, b"")
        assert number == 0, f"{prefix}: {number} {text}"
        answer: bytes = output
        return answer

    def user(self, name: str, caps: Mapping[str, str]) -> str:
        """Make the user client.<name>, or change its caps; its key."""
        flat = [part for pair in caps.items() for part in pair]
        self.command("auth get-or-create", entity=f"client.{name}", caps=flat, format="json")
        self.command("auth caps", entity=f"client.{name}", caps=flat)
        answer = json.loads(self.command("auth get-key", entity=f"client.{name}", format="json"))
        key: str = answer["key"]
        return key

    def controller(self, name: str, namespace: str, *, pool: str = POOL) -> str:
        """A user with the rights of crust's controller in one namespace; its key."""
        scope = f"profile rbd pool={pool} namespace={namespace}"
        return self.user(name, {"mon": "profile rbd", "osd": scope, "mgr": scope})

    def node(self, name: str, namespace: str, *, pool: str = POOL) -> str:
        """A user with the rights of a node in one namespace; its key."""
        scope = f"profile rbd pool={pool} namespace={namespace}"
        return self.user(name, {"mon": "allow r", "osd": scope})

    def make_pool(self, name: str) -> None:
        """Make a pool for images, and wait until it takes writes."""
        import rbd

        self.command("osd pool create", pool=name, pg_num=8)
        with self.ioctx(name) as ioctx:
            ioctx.write_full("ready", b"")
            ioctx.remove_object("ready")
            rbd.RBD().pool_init(ioctx, force=False)

    def delete_pool(self, name: str) -> None:
        """Delete a pool with its content; absent is success. The administrator's client knows it after that."""
        self.command("config set", who="mon", name="mon_allow_pool_delete", value="true")
        self.command("osd pool delete", pool=name, pool2=name, yes_i_really_really_mean_it=True)
        self.admin.wait_for_latest_osdmap()

    def make_namespace(self, name: str = "", *, pool: str = POOL) -> str:
        """Make a namespace of its own for a test; its name."""
        import rbd

        name = name or f"ns-{uuid.uuid4().hex[:8]}"
        with self.ioctx(pool) as ioctx:
            rbd.RBD().namespace_create(ioctx, name)
        return name

    @contextlib.contextmanager
    def ioctx(self, pool: str = POOL, namespace: str = "") -> Iterator[Any]:
        """The administrator's I/O context (rados.Ioctx)."""
        ioctx = self.admin.open_ioctx(pool)
        try:
            ioctx.set_namespace(namespace)
            yield ioctx
        finally:
            ioctx.close()

    def start(self, name: str) -> None:
        """Start a daemon: "mon.a" (or b, or c), "osd" or "mgr"."""
        kind, _, number = name.partition(".")
        number = number or {"osd": "0", "mgr": "x"}[name]
        self.daemons[name] = Daemon(name, self._spawn(f"ceph-{kind}", "-i", number, "-f"))

    def start_monitors(self) -> None:
        """Start those monitors that do not run."""
        for address in self._addresses():
            if f"mon.{address}" not in self.daemons:
                self.start(f"mon.{address}")

    def restart(self) -> None:
        """End all daemons and start them again. A memstore is empty then, and useless."""
        self.end_daemons()
        self.start_monitors()
        self.start("osd")
        with self.ioctx() as ioctx:
            ioctx.write_full("ready", b"")

    def end_daemons(self) -> None:
        """End all daemons: the manager first, the monitors last."""
        for name in ("mgr", "osd", *(f"mon.{address}" for address in self._addresses())):
            daemon = self.daemons.pop(name, None)
            if daemon is not None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.end()

    def close(self) -> None:
        """End the administrator's connection and all daemons."""
        if self._admin is not None:
            self._admin.shutdown()
            self._admin = None
        self.end_daemons()

    def make(self, *, with_mgr: bool) -> None:
        """Write the configuration, make the stores and start the daemons."""
        self.directory.mkdir(parents=True, mode=0o700)
        for name in ("osd", "mgr", *(f"mon.{address}" for address in self._addresses())):
            (self.directory / name).mkdir()
        self._write_conf()
        self._make_keys()
        osd_uuid = str(uuid.uuid4())
        self._make_monitors()
        self.start_monitors()
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self.command("osd new", uuid=osd_uuid)
        self.start("osd")
        if with_mgr:
            self.start("mgr")
        self.make_pool(POOL)
        if with_mgr:
            self.wait_for_statistics(POOL)

    def connected_users(self) -> frozenset[str]:
        """The users that have a session with the first monitor now, without `client.`."""
        sessions = self._monitor_asked("sessions")
        return frozenset(session["entity_name"].removeprefix("client.") for session in sessions)

    def clients_of(self, user: str) -> frozenset[str]:
        """The addresses of the clients of client.<user> that have a session now, as the blocklist has them."""
        sessions = (
            session
            for session in self._monitor_asked("sessions")
            if session["entity_name"] == f"client.{user}"
        )
        return frozenset(
            f"{address['addr']}/{address['nonce']}"
            for session in sessions
            for address in session["addrs"]["addrvec"]
        )

    def sessions_made(self) -> int:
        """How many sessions the monitor has begun since its start, of everybody."""
        return int(self._monitor_asked("perf dump")["mon"]["session_add"])

    def _monitor_asked(self, prefix: str) -> Any:
        """By the admin socket."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(self.directory / "mon.a.asok"))
            asked.sendall(json.dumps({"prefix": prefix, "format": "json"}).encode() + b"\0")
            with asked.makefile("rb") as answer:
                size = int.from_bytes(answer.read(4), "big")
                return json.loads(answer.read(size))

    def wait_for_statistics(self, pool: str) -> None:
        """Wait until the manager has reported a pool: it does so every few seconds."""
        while True:
            pools = json.loads(self.command("df", format="json"))["pools"]
            if any(row["name"] == pool for row in pools):
                return

    def _write_conf(self) -> None:
        self.conf.write_text(
            _CONF.format(
                directory=self.directory,
                fsid=self.fsid,
                host=self.host,
                monitors=self.monitors,
                first_port=self.first_port + 2 * self.count,
                last_port=self.first_port + _PORTS - 1,
                store=self.store,
            )
        )

    def _make_keys(self) -> None:
        keyring = str(self.directory / "keyring")
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr")
        profile = ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *", "--cap", "mgr")
        caps = {
            "mon.": ("--cap", "mon", "allow *"),
            "client.admin": (*everything, "allow *"),
            "osd.0": (*profile, "allow profile osd"),
            "mgr.x": ("--cap", "mon", "allow profile mgr", "--cap", "osd", "allow *"),
        }
        for number, (name, granted) in enumerate(caps.items()):
            create = ("-C",) if number == 0 else ()
            self._run("ceph-authtool", *create, keyring, "-g", "-n", name, *granted)
        shown = self._run("ceph-authtool", keyring, "-n", "client.admin", "-p")
        self.keys["client.admin"] = shown.decode().strip()

    def _make_monitors(self) -> None:
        monmap = str(self.directory / "monmap")
        added = [part for monitor in self._addresses().items() for part in ("--addv", *monitor)]
        self._run("monmaptool", "--create", *added, "--fsid", self.fsid, monmap)
        keyring = str(self.directory / "keyring")
        for name in self._addresses():
            self._run("ceph-mon", "--mkfs", "-i", name, "--monmap", monmap, "-k", keyring)

    def connected(self, user: str, key: str) -> Any:
        """A connection of a user (rados.Rados); the caller shuts it down, and closes its I/O contexts."""
        import rados

        options = {
            "mon_host": self.monitors,
            "key": key,
            "keyring": "",
            "client_mount_timeout": str(_START_S),
            "rados_osd_op_timeout": str(_START_S),
            "rados_mon_op_timeout": str(_START_S),
            "admin_socket": "",
            "log_file": "",
            "log_to_stderr": "false",
        }
        cluster = rados.Rados(rados_id=user, conf=options)
        cluster.connect()
        return cluster

    def _spawn(self, *argv: str) -> "subprocess.Popen[bytes]":
        with open(self.directory / f"{argv[0]}.out", "ab") as output:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _run(self, *argv: str) -> bytes:
        done = subprocess.run(
            argv, env=self._environment(), capture_output=True, timeout=_START_S, check=False
        )
        assert done.returncode == 0, f"{argv[0]}: {done.stderr.decode('utf-8', 'replace')[-2000:]}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.conf)}


@contextlib.contextmanager
def running(
    directory: Path,
    *,
    store: Store = "memstore",
    with_mgr: bool = False,
    host: str = "127.0.0.1",
    monitors: Monitors = 1,
) -> Iterator[CephCluster]:
    """A cluster in `directory`, which must not exist, while the block runs; its daemons have the address `host`."""
    with _ports() as first_port:
        cluster = CephCluster(directory, str(uuid.uuid4()), first_port, store, host, monitors)
        try:
            cluster.make(with_mgr=with_mgr)
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def _ports() -> Iterator[int]:
    """The first of a range of ports that no other cluster has, below those of outgoing connections."""
    ranges = list(range(20_000, 26_000, _PORTS))
    random.shuffle(ranges)
    for first in ranges:
        with socket.socket(socket.AF_UNIX) as mark, contextlib.ExitStack() as stack:
            try:
                mark.bind(f"\0crust-tests-ceph-{first}")  # held as long as the socket is open
                for port in range(first, first + 6):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            stack.close()
            yield first
            return
    raise AssertionError("no range of ports is free")
