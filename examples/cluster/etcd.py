"""Real members of etcd on one machine, with TLS and access by role, and what goes wrong with them.

Debian's etcd 3.4. Members speak plainly with each other: only what crust sees is like in a cluster. They are killed
by the kernel when the process that started them ends, and know one directory only, below that of their caller.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from crust.cluster.etcd.client.certificates import Files
from crust.settings.cluster import ClusterSettings
from examples.cluster import freezing
from examples.cluster.authority import Authority

PROGRAM = "/usr/bin/etcd"
READY_S = 60.0
PREFIX = "/crust/"
_ACTIVATE_NOSPACE = b"\x08\x01\x18\x01"
"""AlarmRequest: action 1 in field 1, alarm 1 in field 3."""


class Member:
    """One process, that can be killed, stopped, and started again with or without its data."""

    def __init__(self, name: str, directory: Path, certificates: Files, host: str) -> None:
        self.name = name
        self.host = host
        self.client_port, self.peer_port = free_ports(2, host, self)
        self.options: list[str] = []
        self._directory = directory / name
        self._certificates = certificates
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{self.host}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """Where the other members connect."""
        return f"http://{self.host}:{self.peer_port}"

    @property
    def log(self) -> str:
        """What the member has logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def _log(self) -> Path:
        return self._directory.with_suffix(".log")

    def start(self, cluster: Sequence["Member"], token: str) -> None:
        """Start the process; it is not ready yet. Call it on the main thread: the process ends with its thread."""
        given = self._certificates
        urls = ",".join(f"{each.name}={each.peer_url}" for each in cluster)
        argv = [
            "--name", self.name, "--data-dir", str(self._directory), "--unsafe-no-fsync",
            "--listen-client-urls", f"https://{self.address}",
            "--advertise-client-urls", f"https://{self.address}",
            "--listen-peer-urls", self.peer_url,
            "--initial-advertise-peer-urls", self.peer_url,
            "--initial-cluster", urls, "--initial-cluster-token", token,
            "--client-cert-auth", "--trusted-ca-file", given.ca,
            "--cert-file", given.cert, "--key-file", given.key,
            "--enable-grpc-gateway=false", "--logger", "zap", "--log-outputs", "stderr", *self.options,
        ]  # fmt: skip
        self._process, self._ready = _spawn(argv, self._log, {})

    def wait_ready(self) -> None:
        """Wait until it serves clients."""
        _wait_ready(self._ready, self._log)

    def kill(self) -> None:
        """SIGKILL, also if it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open and nothing answers."""
        assert self._process is not None
        freezing.freeze(self._process.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete the data of a member that does not run."""
        assert self._process is None
        shutil.rmtree(self._directory, ignore_errors=True)

    def restore(self, backup: Path, token: str) -> None:
        """Put a backup in the place of the data of a member that does not run, of a cluster of one."""
        self.wipe()
        argv = [
            "/usr/bin/etcdctl", "snapshot", "restore", str(backup), "--data-dir", str(self._directory),
            "--name", self.name, "--initial-cluster", f"{self.name}={self.peer_url}",
            "--initial-advertise-peer-urls", self.peer_url, "--initial-cluster-token", token,
        ]  # fmt: skip
        environment = {"ETCDCTL_API": "3", "PATH": "/usr/bin"}
        subprocess.run(argv, check=True, capture_output=True, timeout=READY_S, env=environment)


class Etcd:
    """The members, and the authority of all certificates."""

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        options: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.directory = directory
        self.authority = Authority(directory, host=host)
        server = self.authority.files("server", self.authority.issue("server", is_server=True))
        self._server = server
        self._options = options
        self._host = host
        self.members = [self.new_member(f"m{number}") for number in range(members)]
        self._token = uuid.uuid4().hex
        self._users: dict[str, Files] = {"root": self.authority.files("root")}

    def new_member(self, name: str) -> Member:
        """A member that was not started, and is none of `members`."""
        member = Member(name, self.directory, self._server, self._host)
        member.options = list(self._options)
        return member

    def start(self) -> None:
        """Start all members."""
        for each in self.members:
            each.start(self.members, self._token)

    def wait_ready(self) -> None:
        """Wait until all serve clients."""
        for each in self.members:
            each.wait_ready()

    def restart(self, member: Member) -> None:
        """Start one again. Without quorum it is never ready."""
        member.start(self.members, self._token)

    def wipe(self) -> None:
        """Lose all data, users and roles too, and start again with the same names and addresses."""
        self.stop()
        for each in self.members:
            each.wipe()
        self.start()

    def restore(self, backup: Path) -> None:
        """Lose all that was written since `backup` (of `etcdctl snapshot save`), and start again: one member."""
        self.stop()
        (member,) = self.members
        member.restore(backup, self._token)
        self.start()

    def stop(self) -> None:
        """Kill all."""
        for each in self.members:
            each.kill()

    def ctl(self, *arguments: str, user: str = "root") -> str:
        """Run etcdctl; returns what it prints. Raises if it fails."""
        given = self.files(user)
        done = subprocess.run(
            [
                "/usr/bin/etcdctl", "--endpoints", ",".join(f"https://{each.address}" for each in self.members),
                "--cacert", given.ca, "--cert", given.cert, "--key", given.key,
                f"--command-timeout={READY_S - 1:.0f}s",  # 5 s are too short for an election on a busy machine
                *arguments,
            ],
            capture_output=True, text=True, timeout=READY_S, check=False,
            env={"ETCDCTL_API": "3", "PATH": "/usr/bin"},
        )  # fmt: skip
        assert done.returncode == 0, f"etcdctl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def protect(self, *nodes: str) -> None:
        """Users and roles as docs/etcd.md makes them, and access by them alone."""
        self.ctl("user", "add", "root", "--no-password")
        self.ctl("role", "add", "root")
        self.ctl("user", "grant-role", "root", "root")
        self.grant("controller", PREFIX)
        for node in nodes:
            self.grant(node, f"{PREFIX}nodes/{node}/")
        self.ctl("auth", "enable")

    def grant(self, user: str, prefix: str) -> None:
        """A user with a role for one prefix."""
        self.ctl("user", "add", user, "--no-password")
        self.ctl("role", "add", user)
        self.ctl("role", "grant-permission", user, "--prefix=true", "readwrite", prefix)
        self.ctl("user", "grant-role", user, user)

    def empty(self) -> None:
        """Delete all keys of crust."""
        self.ctl("del", "--prefix", PREFIX)

    def raise_no_space(self) -> None:
        """The alarm of a database that has reached its quota, which any certificate may raise in etcd 3.4."""
        given = self.files("root")
        credentials = grpc.ssl_channel_credentials(
            *(Path(path).read_bytes() for path in (given.ca, given.key, given.cert))
        )
        with grpc.secure_channel(self.members[0].address, credentials) as channel:
            alarm: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/etcdserverpb.Maintenance/Alarm"
            )
            alarm(_ACTIVATE_NOSPACE, timeout=READY_S)

    def keys(self) -> list[str]:
        """All keys of crust."""
        return self.ctl("get", "--prefix", "--keys-only", PREFIX).split()

    def files(self, user: str) -> Files:
        """The certificate of a user, made at the first call."""
        if user not in self._users:
            self._users[user] = self.authority.files(user)
        return self._users[user]

    def settings(self, user: str, **but: object) -> ClusterSettings:
        """The settings of a program that connects as `user`."""
        files = self.files(user)
        given = {
            "endpoints": tuple(each.address for each in self.members),
            "ca": files.ca,
            "cert": files.cert,
            "key": files.key,
            "prefix": PREFIX,
            "lease_s": 5,
            "settle_s": 5,
        }
        return ClusterSettings.model_validate({**given, **but})


@contextlib.contextmanager
def running(
    directory: Path,
    members: int = 1,
    nodes: Sequence[str] = (),
    options: Sequence[str] = (),
    host: str = "127.0.0.1",
) -> Iterator[Etcd]:
    """Members that run, with users for a controller and `nodes`."""
    etcd = Etcd(directory, members, options, host)
    try:
        etcd.start()
        etcd.wait_ready()
        etcd.protect(*nodes)
        yield etcd
    finally:
        etcd.stop()


@contextlib.contextmanager
def process(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """An etcd with options and variables of the caller, from when it serves to the end of the block."""
    running, ready = _spawn(argv, log, environment)
    try:
        _wait_ready(ready, log)
        yield
    finally:
        running.kill()
        running.wait()


def _spawn(
    argv: Sequence[str], log: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and the socket on which it will say that it is ready."""
    ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ready.bind(f"\0crust-test-{uuid.uuid4().hex}")
    notify = "@" + ready.getsockname()[1:].decode()
    with log.open("ab") as output:
        running = subprocess.Popen(
            ["/usr/bin/setpriv", "--pdeathsig", "KILL", PROGRAM, *argv],
            stdout=output,
            stderr=output,
            env={"NOTIFY_SOCKET": notify, "PATH": "/usr/bin", **environment},
        )
    return running, ready


def _wait_ready(ready: socket.socket, log: Path) -> None:
    ready.settimeout(READY_S)
    try:
        assert b"READY=1" in ready.recv(4096)
    except TimeoutError:
        text = log.read_text(encoding="utf-8", errors="replace")
        raise AssertionError(f"etcd does not start:\n{text[-4000:]}") from None
    finally:
        ready.close()


def free_ports(number: int, host: str, holder: object) -> list[int]:
    """Below those that the kernel gives to clients, so that a member that was killed can have its port again.

    While `holder` lives, no other one on this machine gets them here: the name of a socket says so.
    """
    free: list[int] = []
    while len(free) < number:
        port = random.randrange(26_000, 32_000)  # below are those of Ceph
        with socket.socket(socket.AF_UNIX) as mark, socket.socket() as probe:
            try:
                mark.bind(f"\0crust-test-port-{port}")
                probe.bind((host, port))
            except OSError:
                continue
            weakref.finalize(holder, os.close, mark.detach())
            free.append(port)
    return free
