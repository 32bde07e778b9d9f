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
_ETCD = "http://127.0.0.1:2379"
_USERS = {
    "admin": ("admin", "system:masters"),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Its files are below `directory`, which must exist."""

    directory: Path

    def kubeconfig(self, user: str) -> Path:
        return self.directory / f"{user}.kubeconfig"

    @property
    def admin(self) -> Kubectl:
        return Kubectl(self.kubeconfig("admin"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """All serve while the block runs."""
        for address in (SERVICE, ADDRESS):
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
        self._make_users()
        key = self.directory / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        with ExitStack() as stack:
            for daemon in (
                self._etcd(),
                self._api_server(key),
                self._controller_manager(key),
                self._scheduler(),
            ):
                stack.enter_context(daemon.running())
            self.admin.wait("create", "serviceaccount/default")
            yield

    def _make_users(self) -> None:
        lines = []
        for user, (name, group) in _USERS.items():
            token = secrets.token_hex(16)
            lines.append(f'{token},{name},{user},"{group}"' if group else f"{token},{name},{user}")
            server = {
                "server": f"https://{SERVICE}",
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
            self._write(self.kubeconfig(user), json.dumps(config))
        self._write(self.directory / "tokens.csv", "\n".join(lines))

    def _write(self, path: Path, text: str) -> None:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")

    def _daemon(self, program: str, *flags: str, notifies: bool = True) -> Daemon:
        return Daemon((str(PROGRAMS / program), *flags), self.directory, notifies)

    def _etcd(self) -> Daemon:
        return self._daemon(
            "etcd",
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _api_server(self, key: Path) -> Daemon:
        return self._daemon(
            "kube-apiserver",
            f"--etcd-servers={_ETCD}",
            f"--cert-dir={self.directory}/certificates",
            "--secure-port=443",
            f"--advertise-address={ADDRESS}",
            f"--token-auth-file={self.directory}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            f"--service-cluster-ip-range={SERVICES}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        )

    def _controller_manager(self, key: Path) -> Daemon:
        return self._daemon(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('kube-controller-manager')}",
            f"--service-account-private-key-file={key}",
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
