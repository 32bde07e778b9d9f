"""`crust driver --engine rbd --mode controller` as a process, against a real cluster."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.faults import killing

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RbdDriver:
    """Where it is, and how it is started."""

    base: Path
    config: Path
    mode: str = "controller"
    profile: str = "1.12"
    name: str = "driver"

    @property
    def socket(self) -> Path:
        return self.base / self.name / "csi" / "csi.sock"

    @property
    def log(self) -> Path:
        return self.base / f"{self.name}.log"

    @property
    def pid(self) -> Path:
        """The file with its process id."""
        return self.base / f"{self.name}.pid"

    @property
    def restart_command(self) -> str:
        """Kills it and starts it again."""
        return f"{sys.executable} {killing.__file__} {self.pid} && sh {self.script}"

    @property
    def script(self) -> Path:
        return self.base / f"{self.name}.sh"

    def write(self) -> None:
        """Write the script, and make the socket's directory: nothing else may lie in it."""
        self.socket.parent.mkdir(parents=True, mode=0o700)
        argv = f"{sys.executable} -m crust driver --config={self.config} --mode={self.mode}"
        argv += f" --socket={self.socket} --run-dir={self.base / self.name}"
        argv += f" --csi-profile={self.profile} --node-id=node-of-the-tests"
        self.script.write_text(f"{argv} >>{self.log} 2>&1 &\necho $! >{self.pid}\n")

    def start(self) -> None:
        """Start it; callers wait for its socket."""
        subprocess.run(["/bin/sh", str(self.script)], check=True, timeout=TIMEOUT_S)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve while the block runs; callers wait for the socket."""
        self.write()
        self.start()
        try:
            yield
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        killing.kill(self.pid)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        os.kill(int(self.pid.read_text()), signal.SIGTERM)


def write_config(
    base: Path, ceph: CephCluster, user: str, key: str, namespace: str, *, has_node: bool = False
) -> Path:
    """The settings and the key file."""
    of_node = f'target_roots = ["{base}"]\ncheck_propagation = false\n' if has_node else ""
    key_file = base / "ceph.key"
    key_file.write_text(key + "\n")
    key_file.chmod(0o600)
    config = base / "driver.toml"
    config.write_text(
        f"""engine = "rbd"
log_level = "info"
{of_node}
[rbd]
monitors = "{ceph.monitors}"
pool = "{POOL}"
namespace = "{namespace}"
user = "{user}"
key_file = "{key_file}"
create_pool = true
"""
    )
    return config


def config_without_key(ceph: CephCluster, namespace: str, target_root: Path | str) -> str:
    """The settings of a node that has no key."""
    return f"""engine = "rbd"
log_level = "debug"
target_roots = ["{target_root}"]
check_propagation = false

[rbd]
monitors = "{ceph.monitors}"
pool = "{POOL}"
namespace = "{namespace}"
"""


def write_config_without_key(base: Path, ceph: CephCluster, namespace: str) -> Path:
    config = base / "driver.toml"
    config.write_text(config_without_key(ceph, namespace, base))
    return config


@contextmanager
def serving(
    ceph: CephCluster, *, profile: str = "1.12", mode: str = "controller"
) -> Iterator[RbdDriver]:
    """A driver with a namespace of its own, while the block runs."""
    namespace = ceph.make_namespace()
    user = f"controller-{namespace}"
    key = ceph.controller(user, namespace)
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        base = Path(name)
        config = write_config(base, ceph, user, key, namespace, has_node=mode != "controller")
        driver = RbdDriver(base, config, mode=mode, profile=profile)
        with driver.running():
            yield driver
