"""A Ceph controller that cannot use its table [kubernetes] is refused before it serves: lost nodes would stay so."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

RUN = "from crust.cli.main import main; main()"
ENDS_S = 60


def config(base: Path) -> Path:
    """The settings of a controller whose cluster is away: it serves, and waits for the pool."""
    key_file = base / "ceph.key"
    key_file.write_text("AQBSV9xlAAAAABAAPJzE2tN2k7b1S5bNn3u1gA==\n")
    key_file.chmod(0o600)
    path = base / "driver.toml"
    path.write_text(
        f"""
socket = "{base}/csi.sock"
run_dir = "{base}/run"
node_id = "controller"
engine = "rbd"
mode = "controller"

[rbd]
monitors = "[v2:127.0.0.1:1,v1:127.0.0.1:2]"
pool = "kubernetes"
user = "crust"
key_file = "{key_file}"

[kubernetes]
kubeconfig = "{base}/kubeconfig"
"""
    )
    return path


async def said_at_its_end(base: Path, *modules: Path) -> str:
    """What it says until it ends, with an exit code of 2; `modules` come before the installed ones."""
    path = os.pathsep.join([*map(str, modules), *filter(None, sys.path)])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "driver", f"--config={config(base)}"),
        env={**os.environ, "PYTHONPATH": path},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(ENDS_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = out.decode() + err.decode()
    assert process.returncode == 2, said
    return said


def check_never_served(said: str) -> None:
    assert "driver serves" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("content", "why"), [(None, "kubeconfig not found"), ("[]", "not the form of a kubeconfig")]
)
async def test_controller_with_an_unusable_kubeconfig_is_refused_before_it_serves(
    tmp_path: Path, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "kubeconfig").write_text(content)
    said = await said_at_its_end(tmp_path)
    assert "UnusableKubeconfig" in said
    assert f"{tmp_path}/kubeconfig" in said
    assert why in said
    assert "correct kubernetes.kubeconfig" in said
    check_never_served(said)


async def test_controller_without_the_kubernetes_client_is_refused_before_it_serves(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "modules"
    missing.mkdir()
    (missing / "lightkube.py").write_text("raise ImportError(__name__)\n")
    said = await said_at_its_end(tmp_path, missing)
    assert "InvalidSettings" in said
    assert "install crust-csi[kubernetes]" in said
    check_never_served(said)
