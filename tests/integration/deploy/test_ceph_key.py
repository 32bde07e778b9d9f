"""The init container `ceph-key` of the overlay ceph-controller: what it runs, as its user, on a Secret as a kubelet
mounts one. crust must read the copy as that user, and would refuse the Secret's own file.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from crust.ceph import keyfile
from crust.ceph.keyfile import CephKeyFileUnusable

pytestmark = pytest.mark.root

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
KEY = "AQDNsHFnAAAAABAAo0Ue0rJZqEqXn3pL7bYwUQ=="


@dataclass(frozen=True)
class Pod:
    """The two directories of the container, by their paths in it, and who it runs as."""

    init: Any
    user: int
    directories: dict[str, Path]

    def at(self, path: str) -> str:
        """Where a path of the container is here."""
        for inside, outside in self.directories.items():
            path = path.replace(inside, str(outside), 1) if path.startswith(inside) else path
        return path

    def run(self) -> "subprocess.CompletedProcess[str]":
        """What the container runs, with its user and without capabilities."""
        user = str(self.user)
        groups = (f"--reuid={user}", f"--regid={user}", f"--groups={user}")
        nothing = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        command = [self.at(each) for each in self.init["command"]]
        return subprocess.run(
            ["setpriv", *groups, *nothing, *command], capture_output=True, text=True, check=False
        )

    def asked(self, call: Callable[[], str]) -> str:
        """What a call returns, or the name of its error, in a process of the container's user."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.setgroups([self.user])
                os.setgid(self.user)
                os.setuid(self.user)
                answer = call()
            except Exception as err:
                answer = type(err).__name__
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answered:
            text = answered.read()
        os.waitpid(child, 0)
        return text


@pytest.fixture(params=[0o440, 0o644], ids=["0440", "0644"])
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    """The directories as a kubelet makes them: files of root and the fsGroup; all may write to the emptyDir."""
    patch = yaml.safe_load((KUBERNETES / "overlays/ceph-controller/controller.yaml").read_text())
    deployment = yaml.safe_load((KUBERNETES / "controller/deployment.yaml").read_text())
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    [init] = patch["spec"]["template"]["spec"]["initContainers"]
    assert context["fsGroup"] == context["runAsGroup"] == context["runAsUser"]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # its parents let the user through
    with tempfile.TemporaryDirectory(prefix="crust-") as base:
        os.chmod(base, 0o755)
        directories = {
            each["mountPath"]: Path(base) / each["name"] for each in init["volumeMounts"]
        }
        for mount in init["volumeMounts"]:
            path = directories[mount["mountPath"]]
            path.mkdir()
            os.chown(path, 0, context["fsGroup"])
            if mount.get("readOnly"):
                _fill(path, context["fsGroup"], request.param)
            else:
                path.chmod(0o2777)
        yield Pod(init, context["runAsUser"], directories)


def _fill(path: Path, group: int, mode: int) -> None:
    """A Secret with the key `key`: a link to a file in a directory that is replaced atomically."""
    version = path / "..2026_11_22_10_00_00.1"
    version.mkdir()
    (version / "key").write_text(KEY)
    (path / "..data").symlink_to(version.name)
    (path / "key").symlink_to("..data/key")
    os.chown(version, 0, group)
    version.chmod(0o2755)
    os.chown(version / "key", 0, group)
    (version / "key").chmod(mode)
    path.chmod(0o3755)


def test_copy_is_the_users_alone_and_survives_a_restart(pod: Pod) -> None:
    settings = (KUBERNETES / "overlays/ceph-controller/controller.toml").read_text()
    assert 'key_file = "/etc/crust-ceph/key"' in settings
    copy = Path(pod.at("/etc/crust-ceph/key"))
    for _ in range(2):
        done = pod.run()
        assert (done.returncode, done.stderr) == (0, "")
        found = copy.lstat()
        assert (found.st_uid, found.st_mode & 0o7777) == (pod.user, 0o600)
        assert pod.asked(lambda: keyfile.read(str(copy), "crust-controller")) == KEY


def test_file_of_the_secret_itself_is_refused(pod: Pod) -> None:
    """Else the init container would do nothing."""
    path = pod.at("/secret/key")
    asked = pod.asked(lambda: keyfile.read(path, "crust-controller"))
    assert asked == CephKeyFileUnusable.__name__
