"""`crust install` and `crust uninstall` below a directory that stands for /."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crust.blockdriver.engines.files import pool
from crust.cli import install, main
from crust.cli.programs import PROGRAMS
from crust.core import errors
from crust.host.files import durable
from crust.host.process import syscalls
from tests.support.faults import lies
from tests.support.raised import raised
from tests.support.records import frozen_nodes, frozen_pools

SOURCE = Path(__file__).parents[3] / "deploy"
COMMAND = "/opt/crust/bin/crust"


class Systemd:
    """Knows which units are active, and counts reloads. `code`: with what systemctl ends."""

    def __init__(self, *active: str, code: int = 0) -> None:
        self.active = active
        self.code = code
        self.reloads = 0

    def __call__(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        if arguments[0] == "daemon-reload":
            self.reloads += 1
        listed = "".join(f"{name} loaded active running\n" for name in self.active)
        return subprocess.CompletedProcess(arguments, self.code, listed, "")


def run(root: Path, systemd: Systemd | None = None, source: Path = SOURCE) -> list[str]:
    report: list[str] = []
    install.install(root, source, COMMAND, systemd or Systemd(), report.append)
    return report


def remove(root: Path, systemd: Systemd | None = None) -> list[str]:
    report: list[str] = []
    install.uninstall(root, SOURCE, systemd or Systemd(), report.append)
    return report


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_units_start_the_command_of_this_environment(tmp_path: Path) -> None:
    systemd = Systemd()
    run(tmp_path, systemd)
    for program in ("node", "proxy", "shim", "driver", "kata"):
        unit = tmp_path / install.UNITS / f"crust-{program}.service"
        assert (
            f"ExecStart={COMMAND} {program} --config /etc/crust/{program}.toml" in unit.read_text()
        )
        assert (unit.stat().st_mode & 0o777) == 0o644
        assert (tmp_path / "etc/crust" / f"{program}.toml").exists()
    assert os.readlink(tmp_path / install.COMMAND) == COMMAND
    assert (tmp_path / install.RULES / "59-crust.rules").exists()
    assert systemd.reloads == 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where crust is installed."""
    run(tmp_path)
    return tmp_path


def test_second_installation_replaces_units_and_keeps_settings(root: Path) -> None:
    unit, settings = root / install.UNITS / "crust-node.service", root / "etc/crust/node.toml"
    unit.write_text("[Unit]")
    settings.write_text("log_level = 'debug'")
    report = run(root)
    assert "ExecStart=" in unit.read_text()
    assert settings.read_text() == "log_level = 'debug'"
    assert f"/{install.UNITS}: written: crust-node.service" in report
    names = "driver.toml, kata.toml, node.toml, proxy.toml, shim.toml"
    assert f"/etc/crust: kept, they are yours: {names}" in report
    assert len(report) <= 10


def test_install_from_checkout_writes_man_pages_and_completion_scripts(root: Path) -> None:
    pages = {page.name: page.read_bytes() for page in (SOURCE.parent / "docs" / "man").iterdir()}
    installed = {page.name: page.read_bytes() for page in (root / install.MAN_PAGES).iterdir()}
    assert installed == pages
    for shell, path in install.COMPLETIONS.items():
        text = (root / path).read_text()
        assert text == CliRunner().invoke(main.main, ["completion", shell]).output
    assert (root / install.COMPLETIONS["zsh"]).read_text().startswith("#compdef crust")


def test_install_from_wheel_takes_man_pages_of_its_environment(tmp_path: Path) -> None:
    source = tmp_path / "environment/share/crust"
    shutil.copytree(SOURCE, source)
    page = tmp_path / "environment/share/man/man1/crust.1"
    page.parent.mkdir(parents=True)
    page.write_text("wheel's")
    page.with_name("other.1").touch()
    root = tmp_path / "root"
    run(root, source=source)
    assert [page.name for page in (root / install.MAN_PAGES).iterdir()] == ["crust.1"]
    assert (root / install.MAN_PAGES / "crust.1").read_text() == "wheel's"


def test_unit_in_etc_that_hides_the_installed_one_is_named(tmp_path: Path) -> None:
    old = tmp_path / "etc/systemd/system/crust-node.service"
    old.parent.mkdir(parents=True)
    old.write_text("[Unit]")
    assert any("/etc/systemd/system/crust-node.service hides" in line for line in run(tmp_path))


@pytest.mark.parametrize("failing", range(9))
def test_full_disk_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    for path in (root / install.UNITS).iterdir():
        path.write_text("older")
    before = tree(root)
    written: list[Any] = []
    real = durable.write_staged

    def write(path: Path, data: bytes, *, mode: int) -> None:
        written.append(path)
        if len(written) > failing:
            real(path, data[:10], mode=mode)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data, mode=mode)

    monkeypatch.setattr(durable, "write_staged", write)
    if failing >= len(list((root / install.UNITS).iterdir())):
        run(root)
        return
    with pytest.raises(OSError, match="No space left"):
        run(root)
    assert tree(root) == before


def test_install_without_an_answer_is_refused_or_complete(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run(root)
    whole = tree(root)

    def ask() -> None:
        shutil.rmtree(root, ignore_errors=True)
        run(root)

    paths = (*(SOURCE / name for name in ("systemd", "host", "crust")), root / install.MANIFEST)
    concerns = lies.Concerns(frozenset(map(str, paths)), (str(SOURCE.parent / "docs/man"),))
    for asked in lies.failures(ask, concerns, errnos_of=lies.in_turn(0)):
        assert asked.error is not None or tree(root) == whole, str(asked.failure)


def test_file_at_the_commands_path_is_not_replaced(tmp_path: Path) -> None:
    command = tmp_path / install.COMMAND
    command.parent.mkdir(parents=True)
    command.write_text("somebody's")
    with pytest.raises(install.NotInstallable, match="is in the way"):
        run(tmp_path)
    assert tree(tmp_path) == {str(install.COMMAND): b"somebody's"}


def test_uninstall_leaves_settings_alone(root: Path) -> None:
    remove(root)
    assert set(tree(root)) == {
        f"etc/crust/{program}.toml" for program in ("node", "proxy", "shim", "driver", "kata")
    }
    assert not os.path.lexists(root / install.COMMAND)
    remove(root)


def test_uninstall_removes_what_an_older_version_installed(tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(SOURCE, older)
    (older / "systemd" / "crust-old.service").write_text("[Unit]\n")
    root = tmp_path / "root"
    run(root, source=older)
    run(root)
    assert (root / install.UNITS / "crust-old.service").exists()
    systemd = Systemd("crust-old.service")
    with pytest.raises(install.NotInstallable, match=r"crust-old\.service still runs"):
        remove(root, systemd)
    report = remove(root)
    assert f"/{install.UNITS}/crust-old.service: removed" in report
    assert [path for path in tree(root) if not path.startswith("etc/crust/")] == []
    assert not (root / install.MANIFEST).parent.exists()


def test_uninstall_removes_nothing_else_whatever_the_list_says(root: Path) -> None:
    theirs = [
        "etc/passwd",
        "usr/local/lib/systemd/system/../../../../etc/crust-x",
        f"{install.UNITS}/nginx.service",
    ]
    for path in theirs:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("theirs")
    with (root / install.MANIFEST).open("a") as listed:
        listed.write("".join(f"{path}\n/{path}\n" for path in theirs))
    remove(root)
    assert all((root / path).exists() for path in theirs)


def test_uninstall_is_refused_while_a_unit_runs(root: Path) -> None:
    before = tree(root)
    with pytest.raises(install.NotInstallable, match=r"crust-node\.service still runs") as caught:
        remove(root, Systemd("crust-node.service"))
    assert "systemctl disable --now crust-node.service" in str(caught.value)
    assert tree(root) == before


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("run/crust/volumes/0123", "the entry 0123"),
        ("run/crust/driver/{boot}/pool-v1.json", "the staged volume pool-v1"),
        ("run/rbd/{boot}/pool-v2.json", "the staged volume pool-v2"),
    ],
)
def test_uninstall_names_volumes_in_use_and_removes_nothing(
    root: Path, path: str, name: str
) -> None:
    """Also those of a driver that a disabled unit ran: its settings file is there."""
    driver = 'driver_name = "b.example"\nsocket = "/run/rbd/csi.sock"\nrun_dir = "/run/rbd"\n'
    (root / "etc/crust/driver.toml").write_text(driver)
    left = root / path.format(boot=syscalls.boot_id())
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    before = tree(root)
    with pytest.raises(install.NotInstallable, match=name) as caught:
        remove(root)
    assert "delete all pods, PVCs and snapshots" in str(caught.value)
    assert tree(root) == before
    left.unlink()
    remove(root)


def test_uninstall_without_an_answer_is_refused(root: Path) -> None:
    """What it cannot read may name volumes in use."""
    before = tree(root)
    (root / "etc/crust/node.toml").write_text("colour = 1\n")
    with raised("InvalidSettings", match="colour is no setting"):
        remove(root)
    (root / "etc/crust/node.toml").write_bytes(before["etc/crust/node.toml"])
    volumes = root / "run/crust/volumes"
    volumes.parent.mkdir(parents=True)
    volumes.touch()
    with pytest.raises(errors.CrustError, match="run/crust/volumes"):
        remove(root)
    volumes.unlink()
    assert tree(root) == before


def test_work_goes_on_without_a_reader_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `crust install | head`."""
    said: list[bool] = []

    def install_nothing(*arguments: Any) -> bool:
        for _ in range(2):
            arguments[-1]("a line")
            said.append(True)
        return True

    monkeypatch.setattr(install, "install", install_nothing)
    for name in ("check_settings", "command_path"):
        monkeypatch.setattr(install, name, lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as lines:
        monkeypatch.setattr("sys.stdout", lines)
        umask = os.umask(0o022)
        try:
            install.run_install()
        finally:
            os.umask(umask)
            os.dup2(null := os.open(os.devnull, os.O_WRONLY), writer)  # its last flush succeeds
            os.close(null)
    assert len(said) == 2


def test_missing_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(install.NotInstallable, match="bin/crust does not exist") as caught:
        install.command_path()
    assert "the wheel that `make wheel` writes" in str(caught.value)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/crust").touch()
    (tmp_path / "share/crust").mkdir(parents=True)
    with pytest.raises(install.NotInstallable, match="share/crust/systemd does not exist"):
        install.command_path()
    (tmp_path / "share/crust/systemd").mkdir()
    assert install.command_path() == f"{tmp_path}/bin/crust"


def test_shipped_files_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert install.shipped() == SOURCE
    shutil.copytree(SOURCE, tmp_path / "share/crust")
    assert install.shipped() == tmp_path / "share/crust"


def test_systemd_that_does_not_run_is_a_warning(tmp_path: Path) -> None:
    last = run(tmp_path, Systemd(code=127))[-1]
    assert last.startswith("warning: systemctl daemon-reload failed")


def test_kept_settings_that_a_daemon_refuses_are_named(root: Path) -> None:
    """Before the restart that would leave its unit down for good; a setting that has gone does not."""
    settings = root / "etc/crust"
    install.check_settings(settings)
    wanted = 'socket = "/run/s"\ndriver_socket = "/run/d"\n'
    (settings / "shim-vendor.toml").write_text(f'{wanted}defer = "always"\n')
    (settings / "notes.toml").write_text("colour = 1\n")
    install.check_settings(settings)
    (settings / "shim-vendor.toml").write_text(f"{wanted}colour = 1\n")
    with raised("SettingsRefused", match="shim-vendor.toml: colour is no setting"):
        install.check_settings(settings)


@pytest.mark.parametrize("number", [pool.SCHEMA - 2, pool.SCHEMA - 1, pool.SCHEMA, pool.SCHEMA + 1])
@pytest.mark.parametrize("program", ["driver", "node"])
def test_pool_of_an_unknown_layout_is_named_before_the_restart(
    tmp_path: Path, program: str, number: int
) -> None:
    """The way back over a raised layout."""
    state = tmp_path / "block"
    form = {"driver": 'socket = "/run/s"\n', "node": "[driver]\n"}[program]
    (tmp_path / f"{program}.toml").write_text(f'{form}state_dir = "{state}"\n')
    install.check_settings(tmp_path)  # of a pool that is absent the driver tells itself
    state.mkdir()
    identity = {"schema": number, "pool_id": "0123456789abcdef", "created": ""}
    (state / "pool.json").write_text(json.dumps(identity))
    if number in (pool.SCHEMA - 1, pool.SCHEMA):
        install.check_settings(tmp_path)
    else:
        with raised(
            "SettingsRefused", match=f"{program}.toml: .*{state}/pool.json: .*schema {number}"
        ):
            install.check_settings(tmp_path)
    assert os.listdir(state) == ["pool.json"]


@pytest.mark.parametrize("commit", frozen_nodes.COMMITS)
def test_settings_of_earlier_commits_start_each_daemon(tmp_path: Path, commit: str) -> None:
    frozen_pools.lay_out(frozen_nodes.load(commit).parts["settings"], tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(PROGRAMS)
    install.check_settings(tmp_path)


def test_first_installation_alone_says_the_first_steps(tmp_path: Path) -> None:
    said: list[str] = []
    arguments = (tmp_path, SOURCE, COMMAND, Systemd(), said.append)
    assert install.install(*arguments)
    assert not install.install(*arguments)
