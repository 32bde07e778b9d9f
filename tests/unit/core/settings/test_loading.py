"""Settings: defaults < file < environment < flags, and nothing unknown."""

import json
import pkgutil
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from crust.blockdriver.settings import DriverSettings
from crust.cli.programs import PROGRAMS
from crust.core.settings import loading
from crust.core.settings.program import MEANT, Table
from crust.csi_shim.settings import ShimSettings
from crust.proxy.settings import ProxySettings

DRIVER = {"name": "d.example.com", "socket": "/run/d.sock", "backend": "/run/s.sock"}

TOML = """
run_dir = "/run/file"
handler_grace_s = 1.5
[[drivers]]
name = "file.example.com"
socket = "/run/a.sock"
backend = "/run/b.sock"
"""


def proxy(toml: str = "", environ: dict[str, str] | None = None, **flags: Any) -> ProxySettings:
    return loading.load(ProxySettings, "proxy", toml=toml, environ=environ or {}, flags=flags)


def test_flags_win_over_the_environment_and_that_over_the_file() -> None:
    environ = {"CRUST_RUN_DIR": "/run/env", "CRUST_HANDLER_GRACE_S": "2.5"}
    loaded = proxy(TOML, environ, run_dir="/run/flag")
    assert loaded.run_dir == "/run/flag"
    assert loaded.handler_grace_s == 2.5
    assert loaded.drivers[0].name == "file.example.com"
    assert proxy(TOML, environ).run_dir == "/run/env"
    assert proxy(TOML).run_dir == "/run/file"


def test_flag_that_was_not_given_changes_nothing() -> None:
    assert proxy(TOML, {}, run_dir=None).run_dir == "/run/file"


def test_list_in_the_environment_is_split_at_commas() -> None:
    loaded = proxy(TOML, {"CRUST_TARGET_ROOTS": "/a,/b"})
    assert loaded.target_roots == ("/a", "/b")


def test_variables_that_are_not_crusts_are_ignored() -> None:
    """A Service named "crust" gives these to every pod of its namespace."""
    environ = {
        "RUN_DIR": "/x",
        "_CRUST_COMPLETE": "1",
        "CRUST_SERVICE_HOST": "10.0.0.1",
        "CRUST_SERVICE_PORT_METRICS": "9090",
        "CRUST_PORT": "tcp://10.0.0.1:9090",
        "CRUST_PORT_9090_TCP_ADDR": "10.0.0.1",
    }
    assert proxy(TOML, environ).run_dir == "/run/file"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("CRUST_NONSENSE", "there is no setting for the environment's CRUST_NONSENSE"),
        ("CRUST_LOG_LEVL", "did you mean CRUST_LOG_LEVEL?"),
        ("CRUST_HANDLER_GRACE_S", "handler_grace_s"),
    ],
)
def test_unknown_or_invalid_environment_key_is_refused(key: str, words: str) -> None:
    with pytest.raises(loading.InvalidSettings) as caught:
        proxy(TOML, {key: "x"})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "flags", "words"),
    [
        ('colour = "red"', {"drivers": (DRIVER,)}, "colour"),
        ("run_dir = [", {}, "not TOML"),
        ("", {}, "drivers"),
        ("", {"drivers": ()}, "drivers"),
        ("", {"drivers": ({**DRIVER, "colour": "red"},)}, "colour"),
        ("", {"drivers": ({**DRIVER, "socket": "relative.sock"},)}, "socket"),
        ("", {"drivers": ({**DRIVER, "socket": "/" + "s" * 107},)}, "socket"),
        ("", {"drivers": ({**DRIVER, "name": "no spaces"},)}, "name"),
        ("", {"drivers": (DRIVER, {**DRIVER, "socket": "/t"})}, "drivers have the name"),
        ("", {"drivers": (DRIVER, {**DRIVER, "name": "e"})}, "drivers have the socket"),
        ("", {"drivers": (DRIVER,), "handler_grace_s": -1}, "handler_grace_s"),
        ("", {"drivers": (DRIVER,), "handler_grace_s": "nan"}, "handler_grace_s"),
        ("", {"drivers": (DRIVER,), "log_level": "loud"}, "log_level"),
        ("", {"drivers": (DRIVER,), "target_roots": ()}, "target_roots"),
        ("", {"drivers": (DRIVER,), "target_roots": ("relative",)}, "target_roots"),
    ],
)
def test_invalid_setting_is_refused_by_name(toml: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(loading.InvalidSettings, match="crust proxy cannot start") as caught:
        proxy(toml, **flags)
    assert words in str(caught.value)
    assert "crust config check" in caught.value.hint


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_pattern_of_a_setting_has_its_words(program: str) -> None:
    schema = json.dumps(pkgutil.resolve_name(PROGRAMS[program].model).model_json_schema())
    patterns = {
        json.loads(f'"{text}"') for text in re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', schema)
    }
    assert patterns
    assert patterns - set(MEANT) == set()


def test_default_of_the_machine_is_weaker_than_the_file() -> None:
    """The kubelet's name for the node is often not the host's."""
    given = {"socket": "/run/s.sock"}
    here = {"node_id": "host"}
    load = loading.load
    toml = 'node_id = "node-1"'
    assert load(DriverSettings, "d", environ={}, flags=given, defaults=here).node_id == "host"
    loaded = load(DriverSettings, "d", toml=toml, environ={}, flags=given, defaults=here)
    assert loaded.node_id == "node-1"


@pytest.mark.parametrize(
    "endpoint",
    ["unix:///run/csi.sock", "unix:/run/csi.sock", "/run/csi.sock", "unix:////run/csi.sock"],
)
def test_csi_endpoint_is_the_csi_socket_of_every_program(endpoint: str) -> None:
    environ = {"CSI_ENDPOINT": endpoint}
    driver = loading.load(DriverSettings, "driver", environ=environ, flags={"node_id": "n"})
    assert driver.socket == "/run/csi.sock"
    flags = {"driver_socket": "/run/d.sock"}
    shim = loading.load(ShimSettings, "shim", environ=environ, flags=flags)
    assert shim.socket == "/run/csi.sock"
    behind = {"name": "d.example.com", "backend": "/run/s.sock"}
    loaded = proxy("", environ, drivers=({**DRIVER, "name": "other"}, {**behind, "backend": "/t"}))
    assert [driver.socket for driver in loaded.drivers] == [DRIVER["socket"], "/run/csi.sock"]


def test_csi_endpoint_beats_file_and_yields_to_crusts_own_variable() -> None:
    environ = {"CSI_ENDPOINT": "unix:///run/csi.sock"}
    toml, flags = 'socket = "/run/file.sock"', {"node_id": "n"}
    load = loading.load
    assert (
        load(DriverSettings, "d", toml=toml, environ=environ, flags=flags).socket == "/run/csi.sock"
    )
    environ["CRUST_SOCKET"] = "/run/own.sock"
    assert (
        load(DriverSettings, "d", toml=toml, environ=environ, flags=flags).socket == "/run/own.sock"
    )


def test_csi_endpoint_of_another_kind_is_refused() -> None:
    environ = {"CSI_ENDPOINT": "tcp://127.0.0.1:10000"}
    with pytest.raises(loading.InvalidSettings, match="CSI_ENDPOINT is 'tcp://"):
        loading.load(DriverSettings, "driver", environ=environ, flags={"node_id": "n"})


def test_shim_and_driver_report_missing_settings() -> None:
    for model, missing in ((ShimSettings, "driver_socket"), (DriverSettings, "node_id")):
        with pytest.raises(loading.InvalidSettings, match=missing):
            loading.load(model, "it", environ={}, flags={"socket": "/run/s.sock"})


def test_setting_that_has_gone_is_dropped_and_named() -> None:
    class Part(Table):
        gone: ClassVar[Mapping[str, str]] = {"old": "set `new`"}
        new: str = ""

    class Whole(Table):
        parts: tuple[Part, ...] = ()
        one: Part | None = None

    values: dict[str, Any] = {
        "parts": [{"old": 1}, {"new": "x", "old": 2}],
        "one": {"old": 3},
        "old": 4,
    }
    told = loading.remove_gone(values, Whole)
    assert values == {"parts": [{}, {"new": "x"}], "one": {}, "old": 4}
    assert [sentence.partition(" ")[0] for sentence in told] == [
        "parts.old",
        "parts.old",
        "one.old",
    ]
