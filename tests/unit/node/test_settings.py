"""The settings of `crust node`: what may be left out, and what cannot work in one process."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver import serve
from crust.blockdriver.settings import DriverSettings
from crust.core.settings import loading
from crust.core.settings.program import ProgramSettings
from crust.node.settings import NodeSettings

DEPLOY = Path(__file__).parents[3] / "deploy" / "crust"
SHIPPED = (DEPLOY / "node.toml").read_text().replace("[driver]\n", "[[driver]]\n")
"""As docs/multi-node.md has an operator begin the table of a second driver."""
ONE_NAME = "tables 1 and 2 of driver have the driver_name 'block.csi.crust.dev': give each its own"
FOREIGN = """
[[proxy.drivers]]
name = "csi.example.com"
socket = "/run/co.sock"
backend = "/run/crust/shim/csi.sock"
[shim]
driver_socket = "/run/inner.sock"
"""


WRAPPING = Path(__file__).parents[3] / "docs" / "wrapping.md"


def load(toml: str = "", **environ: str) -> NodeSettings:
    return loading.load(NodeSettings, "node", toml=toml, environ=environ, flags={})


def test_node_without_settings_serves_our_driver_to_kubelet() -> None:
    settings = load()
    (driver,) = settings.driver
    (served,) = settings.proxy.drivers
    (shim,) = settings.shim
    assert served.name == "block.csi.crust.dev"
    assert served.socket == "/var/lib/kubelet/plugins/block.csi.crust.dev/csi.sock"
    assert (served.backend, shim.driver_socket) == (shim.socket, driver.socket)
    assert shim.runtime_socket == driver.runtime_socket == "/run/crust/runtime.sock"
    assert not shim.wrap
    assert driver.node_id == os.uname().nodename
    assert settings.inner_sockets == {shim.socket, driver.socket}


def test_renamed_driver_of_ours_is_served_by_that_name() -> None:
    settings = load('[driver]\ndriver_name = "fast.csi.example.org"\n')
    (served,) = settings.proxy.drivers
    assert served.name == "fast.csi.example.org"
    assert served.socket == "/var/lib/kubelet/plugins/fast.csi.example.org/csi.sock"
    (driver,) = settings.driver
    assert serve.driver_of(driver).name == served.name


def test_csi_endpoint_is_socket_of_one_driver_that_has_none() -> None:
    """CSI, "Packaging": a plugin listens at CSI_ENDPOINT."""
    settings = load(CSI_ENDPOINT="unix:///run/csi/csi.sock")
    (own,) = settings.proxy.drivers
    assert (own.name, own.socket) == ("block.csi.crust.dev", "/run/csi/csi.sock")
    assert own.backend == settings.shim[0].socket
    without = FOREIGN.replace('socket = "/run/co.sock"\n', "")
    (wrapped,) = load(without, CSI_ENDPOINT="unix:///run/csi/csi.sock").proxy.drivers
    assert (wrapped.name, wrapped.socket) == ("csi.example.com", "/run/csi/csi.sock")
    (same,) = load(FOREIGN, CSI_ENDPOINT="unix:///run/co.sock").proxy.drivers
    assert same.socket == "/run/co.sock"


@pytest.mark.parametrize(
    ("toml", "endpoint", "sentence"),
    [
        (FOREIGN, "unix:///run/csi.sock", "0 of 1 drivers have none"),
        ("", "tcp://127.0.0.1:10000", "it must be the path of a UNIX socket"),
        ("", f"unix:///{'x' * 108}", "proxy.drivers.0.socket is longer than 107 bytes"),
        ("[proxy]\ndrivers = 3\n", "unix:///run/csi.sock", "proxy.drivers must be a list"),
        ("[proxy]\ndrivers = [3]\n", "unix:///run/csi.sock", "proxy.drivers.0 must be a table"),
        ("proxy = 3\n", "unix:///run/csi.sock", "proxy must be a table"),
    ],
)
def test_csi_endpoint_that_is_nobodys_is_refused(toml: str, endpoint: str, sentence: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=sentence):
        load(toml, CSI_ENDPOINT=endpoint)


def test_run_directory_moves_its_files_but_no_named_socket() -> None:
    settings = load('[proxy]\nrun_dir = "/run/b"\n')
    (driver,) = settings.driver
    below = (settings.shim[0].socket, settings.shim[0].runtime_socket, driver.run_dir)
    assert all(path.startswith("/run/b/") for path in below)
    assert settings.inner_sockets == {"/run/b/shim/csi.sock", "/run/b/driver/csi.sock"}
    settings = load("[shim]\nsocket = '/run/o.sock'\n")
    assert settings.proxy.drivers[0].backend == settings.shim[0].socket == "/run/o.sock"


def test_the_three_programs_settings_files_mean_the_same_as_tables() -> None:
    text = 'log_format = "json"\n'
    for part in ("driver", "shim"):
        lines = (DEPLOY / f"{part}.toml").read_text().replace('log_format = "json"\n', "")
        text += f"[{part}]\n{lines}\n"
    settings = load(text)
    (driver,) = settings.driver
    assert settings.log_format == "json"
    assert driver.runtime_socket == settings.runtime_socket


def test_foreign_driver_socket_means_our_driver_does_not_run() -> None:
    settings = load(FOREIGN)
    assert settings.driver == ()
    assert settings.shim[0].wrap
    assert settings.inner_sockets == {"/run/crust/shim/csi.sock"}
    assert settings.shim[0].driver_name == "csi.example.com", "the name by which the CO knows it"
    (shim,) = load(FOREIGN + 'driver_name = "other.example.com"\n').shim
    assert shim.driver_name == "other.example.com"


def test_settings_of_a_wrapped_driver_as_the_page_shows_them() -> None:
    """Alone, where its shim's socket is named nowhere, and beside our own."""
    _, _, section = WRAPPING.read_text().partition("## Around a driver")
    texts = re.findall(r"(?:^(?:    .*)?\n)+", section, re.MULTILINE)
    alone, beside = (inspect.cleandoc(text) for text in texts if "[[proxy.drivers]]" in text)
    settings = load(alone)
    (served,), (shim,) = settings.proxy.drivers, settings.shim
    assert (served.backend, shim.driver_name) == (shim.socket, "csi.example.com")
    assert shim.wrap
    assert settings.driver == ()
    settings = load(beside)
    assert len(settings.driver) == 1
    assert [shim.wrap for shim in settings.shim] == [False, True]
    assert settings.shim[0].driver_socket == settings.driver[0].socket
    assert [driver.backend for driver in settings.proxy.drivers] == [
        shim.socket for shim in settings.shim
    ]


TWO = """
[[driver]]
state_dir = "/srv/pool"
[[driver]]
mode = "node"
engine = "rbd"
driver_name = "rbd.csi.crust.dev"
run_dir = "/run/crust/driver-rbd"
[driver.rbd]
monitors = "v2:192.0.2.1:3300"
pool = "kubernetes"
"""


def test_several_drivers_of_ours_are_served_behind_a_shim_each() -> None:
    settings = load(TWO)
    local, shared = settings.driver
    assert (local.engine, local.run_dir) == ("files", "/run/crust/driver")
    assert (shared.engine, shared.socket) == ("rbd", "/run/crust/driver-rbd/csi.sock")
    assert {driver.runtime_socket for driver in settings.driver} == {settings.runtime_socket}
    assert [driver.name for driver in settings.proxy.drivers] == [
        "block.csi.crust.dev",
        "rbd.csi.crust.dev",
    ]
    assert settings.proxy.drivers[1].socket.endswith("/plugins/rbd.csi.crust.dev/csi.sock")
    assert [driver.backend for driver in settings.proxy.drivers] == [
        shim.socket for shim in settings.shim
    ]
    assert [shim.driver_socket for shim in settings.shim] == [local.socket, shared.socket]
    assert not any(shim.wrap for shim in settings.shim)
    assert len(settings.inner_sockets) == 4
    _, first, second = TWO.split("[[driver]]")
    turned = load(f"[[driver]]{second}[[driver]]{first}")
    assert {driver.driver_name: driver.run_dir for driver in turned.driver} == {
        driver.driver_name: driver.run_dir for driver in settings.driver
    }, "a driver that found another one's run_dir would forget what it knows of mounts"


def test_driver_that_is_added_to_installed_settings_is_served_too() -> None:
    _, _, shared = TWO.split("[[driver]]")
    settings = load(f"{SHIPPED}[[driver]]{shared}")
    served = {driver.name: driver.backend for driver in settings.proxy.drivers}
    fronts = {shim.driver_socket: shim.socket for shim in settings.shim}
    assert served == {driver.driver_name: fronts[driver.socket] for driver in settings.driver}
    assert len(served) == 2


def test_several_drivers_of_ours_beside_one_that_is_wrapped() -> None:
    settings = load(
        TWO
        + """
[[shim]]
[[shim]]
socket = "/run/x/shim.sock"
driver_socket = "/run/x/csi.sock"
[proxy]
drivers = [
  {name = "rbd.csi.crust.dev", socket = "/run/b.sock"},
  {name = "block.csi.crust.dev", socket = "/run/a.sock"},
  {name = "csi.example.com", socket = "/run/c.sock", backend = "/run/x/shim.sock"},
]
"""
    )
    served = {driver.name: driver.backend for driver in settings.proxy.drivers}
    fronts = {shim.driver_socket: shim.socket for shim in settings.shim}
    assert {driver.driver_name: fronts[driver.socket] for driver in settings.driver} == {
        name: backend for name, backend in served.items() if name != "csi.example.com"
    }
    assert {shim.driver_socket for shim in settings.shim if shim.wrap} == {"/run/x/csi.sock"}


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[proxy]\nrun_dri = '/run/x'\n", r"proxy\.run_dri is no setting; did you mean run_dir\?"),
        ("[driver]\nsocket = 'x'\n", r"driver\.socket must be an absolute path"),
        ("proxies = 1\n", "proxies is no setting"),
        ("shim = 3\n", "shim must be a list"),
        ("driver = 'ours'\n", "driver must be a list"),
        ("[[proxy]]\n", "proxy must be a table"),
        ("[proxy]\n[proxy.drivers]\nname = 'a'\n", "proxy.drivers must be a list"),
        ("[proxy]\ndrivers = ['a']\n", r"cannot start: proxy\.drivers\.0 must be a table;"),
        ("[proxy]\nlog_level = 'debug'\n", "log_level is a setting of the process"),
        ("[driver]\ntraces = true\n", "traces is a setting of the process"),
        ("[shim]\ncontroller = true\n", "a controller's shim is a process of its own"),
        ("[shim]\nruntime_socket = '/run/o.sock'\n", r"runtime_socket of a shim is '/run/o\.sock'"),
        ("[driver]\nruntime_socket = '/run/o.sock'\n", r"the proxy serves /run/crust/runtime"),
        (FOREIGN + "[driver]\n", "nothing calls the driver at /run/crust/driver/csi.sock"),
        (FOREIGN.replace("/run/crust/shim", "/run/x"), "nothing calls the shim at /run/crust/shim"),
        ("[[shim]]\n[[shim]]\n", "tables 1 and 2 of shim have the socket"),
        (f"{SHIPPED}[[driver]]\nrun_dir = '/run/b'\n", ONE_NAME),
        ("[[driver]]\n[[driver]]\nrun_dir = '/run/b'\n", ONE_NAME),
        (
            "[[driver]]\n[[driver]]\ndriver_name = 'b.example'\n",
            "tables 1 and 2 of driver have the run_dir '/run/crust/driver': give each its own",
        ),
    ],
)
def test_contradictory_settings_are_refused_with_a_reason(toml: str, why: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=why) as caught:
        load(toml)
    assert "crust node cannot start" in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_the_process_has_the_settings_of_every_daemon() -> None:
    settings: Any = load('log_level = "debug"\ntraces = true\n', CRUST_LOG_FORMAT="json")
    assert (settings.log_level, settings.traces, settings.log_format) == ("debug", True, "json")


def test_every_setting_of_the_driver_reaches_it() -> None:
    """`crust driver` and `crust node` compose it by one function, which names them one by one."""
    own = set(DriverSettings.model_fields) - set(ProgramSettings.model_fields)
    source = inspect.getsource(serve)
    assert {name for name in own if f".{name}" not in source} == set()


def test_driver_may_do_without_the_socket_of_the_proxy() -> None:
    (driver,) = load("[driver]\nruntime_socket = ''\n").driver
    assert driver.runtime_socket == ""


def test_name_of_the_node_is_that_of_driver_and_kubernetes() -> None:
    toml = "[proxy.kubernetes]\nruntime_handlers = ['kata']\n"
    settings = load(toml, CRUST_NODE_NAME="node-1")
    (driver,) = settings.driver
    assert settings.proxy.kubernetes is not None
    assert (driver.node_id, settings.proxy.kubernetes.node_name) == ("node-1", "node-1")
    own = load("[driver]\nnode_id = 'own'\n", CRUST_NODE_NAME="node-1")
    assert [driver.node_id for driver in own.driver] == ["own"]
    with pytest.raises(loading.InvalidSettings, match="node_name"):
        load(CRUST_NODE_NAME="")
