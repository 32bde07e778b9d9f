"""`crust config check`: each setting with its source."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crust.cli import config_check, layouts
from crust.cli.main import main
from crust.cli.programs import daemons

DEPLOY = Path(__file__).parents[3] / "deploy" / "crust"


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(daemons, "CONFIG_DIR", tmp_path)
    # not what this machine has in the default directories (test_layouts.py has that)
    monkeypatch.setattr(layouts, "unread", lambda _: ())
    return tmp_path


def run(*flags: str, **environ: str) -> Result:
    return CliRunner().invoke(main, ["config", "check", *flags], env=environ)


def rows(ran: Result) -> dict[str, tuple[str, str]]:
    settings = json.loads(ran.stdout)["settings"]
    return {row["setting"]: (row["value"], row["source"]) for row in settings}


def test_each_setting_has_its_value_and_its_source(etc: Path) -> None:
    path = etc / "shim.toml"
    path.write_text('socket = "/run/a.sock"\ndriver_socket = "/run/b.sock"\nlog_level = "debug"\n')
    ran = run("shim", "-o", "json", CRUST_LOG_LEVEL="warning")
    assert ran.exit_code == 0, ran.output
    settings = rows(ran)
    assert settings["socket"] == ("/run/a.sock", str(path))
    assert settings["log_level"] == ("warning", "$CRUST_LOG_LEVEL")
    assert settings["csi_profile"] == ("1.12", "default")


def test_tables_have_dotted_names_and_derived_values_are_defaults(etc: Path) -> None:
    (etc / "node.toml").write_text('[proxy]\nrun_dir = "/run/x"\n[shim]\nkubelet_root = "/k"\n')
    settings = rows(run("-o", "json"))
    assert settings["proxy.run_dir"] == ("/run/x", f"{etc}/node.toml")
    assert settings["shim[0].kubelet_root"] == ("/k", f"{etc}/node.toml")
    assert settings["shim[0].runtime_socket"] == ("/run/x/runtime.sock", "default")
    assert settings["driver[0].runtime_socket"] == ("/run/x/runtime.sock", "default")


def test_all_files_of_the_directory_are_checked_without_a_name(etc: Path) -> None:
    for name in ("node", "proxy", "shim", "driver"):
        (etc / f"{name}.toml").write_text((DEPLOY / f"{name}.toml").read_text())
    ran = run()
    assert ran.exit_code == 0, ran.output
    assert {line.split()[0] for line in ran.stdout.splitlines()[1:]} == {
        "node", "proxy", "shim", "driver",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "environ", "why"),
    [
        ("log_levl = 'info'", {}, "log_levl is no setting"),
        ("socket = ", {}, "is not TOML"),
        ("socket = 'unix:///x'", {}, "socket must be an absolute path"),
        ("", {"CRUST_LOG_LEVL": "debug"}, "did you mean CRUST_LOG_LEVEL"),
    ],
)
def test_refused_settings_are_a_sentence_and_exit_code_1(
    etc: Path, text: str, environ: dict[str, str], why: str
) -> None:
    (etc / "shim.toml").write_text(text)
    ran = run("shim", **environ)
    assert ran.exit_code == 1
    assert f"{etc}/shim.toml: [InvalidSettings]" in ran.stderr
    assert why in ran.stderr
    assert "Traceback" not in ran.output


def test_good_files_are_shown_beside_a_refused_one(etc: Path) -> None:
    (etc / "shim.toml").write_text("x = 1")
    (etc / "driver.toml").write_text('socket = "/run/d.sock"')
    ran = run("-o", "name")
    assert ran.exit_code == 1
    assert "driver.socket=/run/d.sock" in ran.stdout


def test_nothing_to_check_is_exit_code_1(etc: Path) -> None:
    ran = run()
    assert ran.exit_code == 1
    assert "[NoSettingsFile]" in ran.stderr


def test_config_without_its_program_is_wrong_usage(etc: Path) -> None:
    path = etc / "x.toml"
    path.touch()
    assert run("--config", str(path)).exit_code == 2
    assert run("--config", str(path), "shim", "proxy").exit_code == 2


def test_value_that_looks_like_a_credential_is_hidden() -> None:
    text = 'socket = "/run/d.sock"\nnode_id = "password=hunter2"\n'
    values = {row.setting: row.value for row in config_check.rows_in("driver", text, "f", {})}
    assert "hunter2" not in values["node_id"]
