"""etcd, API server, controller manager and scheduler, with users of their own.

The API server makes its certificate itself, so each client speaks to it by the address of its Service, which is an
address of the loopback interface: no kube-proxy is needed. Tokens are new in each run, in files of root alone.
"""

import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.kubernetes.daemons import PROGRAMS, Daemon
from tests.support.kubernetes.kubectl import Kubectl

SERVICE, SERVICES = "10.96.0.1", "10.96.0.0/24"
NODE, ADDRESS = "node-1", "10.99.0.1"
_USERS = {
    "admin": ("admin", "system:masters"),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Its files are below `directory`, which must exist. Two on one machine have other ports."""

    directory: Path
    port: int = 443
    etcd_port: int = 2379
    """And the next one."""

    def kubeconfig(self, user: str) -> Path:
        return self.directory / f"{user}.kubeconfig"

    @property
    def admin(self) -> Kubectl:
        return Kubectl(self.kubeconfig("admin"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """All serve while the block runs."""
        with ExitStack() as stack:
            stack.enter_context(self.api_running())
            for daemon in (self._controller_manager(), self._scheduler()):
                stack.enter_context(daemon.running())
            self.admin.wait("create", "serviceaccount/default")
            yield

    @contextmanager
    def api_running(self) -> Iterator[None]:
        """The API server and its etcd serve while the block runs: objects are kept, and nobody acts on them."""
        for address in (SERVICE, ADDRESS):
            subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True)
        self._make_users()
        subprocess.run(
            ["openssl", "genrsa", "-out", self._key, "2048"], check=True, capture_output=True
        )
        with self._etcd().running(), self._api_server().running():
            yield

    def define(self, *names: str) -> None:
        """Make the CustomResourceDefinitions of files of `make kubernetes`: snapshots, monitoring."""
        for name in names:
            file = PROGRAMS.parent / f"{name}.yaml"
            self.admin.run("apply", "--server-side", f"--filename={file}")
        self.admin.wait("condition=Established", "crd", "--all")

    @contextmanager
    def snapshots_served(self, *flags: str) -> Iterator[None]:
        """external-snapshotter's definitions are there, and its snapshot-controller runs while the block does."""
        self.define("snapshots")
        user = f"--kubeconfig={self.kubeconfig('admin')}"
        with self._daemon("snapshot-controller", user, *flags, notifies=False).running():
            yield

    def user(self, name: str, token: str) -> Kubectl:
        """Who has a token."""
        server = {
            "server": f"https://{SERVICE}:{self.port}",
            "certificate-authority": f"{self.directory}/certificates/apiserver.crt",
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self._write(self.kubeconfig(name), json.dumps(config))
        return Kubectl(self.kubeconfig(name))

    @property
    def _key(self) -> Path:
        """Of the tokens of service accounts."""
        return self.directory / "service-accounts.key"

    def _make_users(self) -> None:
        lines = []
        for user, (name, group) in _USERS.items():
            token = secrets.token_hex(16)
            lines.append(f'{token},{name},{user},"{group}"' if group else f"{token},{name},{user}")
            self.user(user, token)
        self._write(self.directory / "tokens.csv", "\n".join(lines))

    def _write(self, path: Path, text: str) -> None:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")

    def _daemon(self, program: str, *flags: str, notifies: bool = True) -> Daemon:
        return Daemon((str(PROGRAMS / program), *flags), self.directory, notifies)

    @property
    def _etcd_url(self) -> str:
        return f"http://127.0.0.1:{self.etcd_port}"

    def _etcd(self) -> Daemon:
        return self._daemon(
            "etcd",
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls=http://127.0.0.1:{self.etcd_port + 1}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _api_server(self) -> Daemon:
        return self._daemon(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--cert-dir={self.directory}/certificates",
            f"--secure-port={self.port}",
            f"--advertise-address={ADDRESS}",
            f"--token-auth-file={self.directory}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._key}",
            f"--service-account-key-file={self._key}",
            f"--service-cluster-ip-range={SERVICES}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        )

    def _controller_manager(self) -> Daemon:
        return self._daemon(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('kube-controller-manager')}",
            f"--service-account-private-key-file={self._key}",
            f"--root-ca-file={self.directory}/certificates/apiserver.crt",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            notifies=False,
        )

    def _scheduler(self) -> Daemon:
        return self._daemon(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig('kube-scheduler')}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            notifies=False,
        )
