"""The settings of `crust node`: what may be left out, and what cannot work in one process."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver import serve
from crust.node.settings import NodeSettings
from crust.settings import loading
from crust.settings.driver import DriverSettings
from crust.settings.program import ProgramSettings

DEPLOY = Path(__file__).parents[3] / "deploy" / "crust"
FOREIGN = """
[[proxy.drivers]]
name = "csi.example.com"
socket = "/run/co.sock"
backend = "/run/crust/shim/csi.sock"
[shim]
driver_socket = "/run/inner.sock"
"""


def load(toml: str = "", **environ: str) -> NodeSettings:
    return loading.load(NodeSettings, "node", toml=toml, environ=environ, flags={})


def test_with_no_settings_at_all_it_serves_our_driver_to_the_kubelet() -> None:
    found = load()
    assert found.driver is not None
    (served,) = found.proxy.drivers
    (shim,) = found.shim
    assert served.name == "block.csi.crust.dev"
    assert served.socket == "/var/lib/kubelet/plugins/block.csi.crust.dev/csi.sock"
    assert (served.backend, shim.driver_socket) == (shim.socket, found.driver.socket)
    assert shim.runtime_socket == found.driver.runtime_socket == "/run/crust/runtime.sock"
    assert not shim.wrap
    assert found.driver.node_id == os.uname().nodename
    assert found.inner_sockets == {shim.socket, found.driver.socket}


def test_our_driver_with_another_name_is_served_to_the_kubelet_by_that_name() -> None:
    found = load('[driver]\ndriver_name = "fast.csi.example.org"\n')
    (served,) = found.proxy.drivers
    assert served.name == "fast.csi.example.org"
    assert served.socket == "/var/lib/kubelet/plugins/fast.csi.example.org/csi.sock"
    assert found.driver is not None
    assert serve.driver_of(found.driver).name == served.name


def test_csi_endpoint_is_the_socket_of_the_one_driver_that_has_none() -> None:
    """CSI, "Packaging": a plugin listens at CSI_ENDPOINT."""
    found = load(CSI_ENDPOINT="unix:///run/csi/csi.sock")
    (own,) = found.proxy.drivers
    assert (own.name, own.socket) == ("block.csi.crust.dev", "/run/csi/csi.sock")
    assert own.backend == found.shim[0].socket
    without = FOREIGN.replace('socket = "/run/co.sock"\n', "")
    (wrapped,) = load(without, CSI_ENDPOINT="unix:///run/csi/csi.sock").proxy.drivers
    assert (wrapped.name, wrapped.socket) == ("csi.example.com", "/run/csi/csi.sock")
    (same,) = load(FOREIGN, CSI_ENDPOINT="unix:///run/co.sock").proxy.drivers
    assert same.socket == "/run/co.sock"


@pytest.mark.parametrize(
    ("toml", "endpoint", "sentence"),
    [
        (FOREIGN, "unix:///run/csi.sock", "of 1 drivers 0 have none"),
        ('[proxy]\ndrivers_dir = "/d"\n', "unix:///run/csi.sock", "of 0 drivers 0 have none"),
        ("", "tcp://127.0.0.1:10000", "it must be the path of a UNIX socket"),
        ("", f"unix:///{'x' * 108}", "proxy.drivers.0.socket is longer than 107 bytes"),
        ("[proxy]\ndrivers = 3\n", "unix:///run/csi.sock", "proxy.drivers must be a list"),
        ("[proxy]\ndrivers = [3]\n", "unix:///run/csi.sock", "of 1 drivers 0 have none"),
        ("proxy = 3\n", "unix:///run/csi.sock", "proxy must be a table"),
    ],
)
def test_csi_endpoint_that_is_nobodys_socket_is_refused(
    toml: str, endpoint: str, sentence: str
) -> None:
    with pytest.raises(loading.InvalidSettings, match=sentence):
        load(toml, CSI_ENDPOINT=endpoint)


def test_a_run_directory_moves_everything_that_is_below_it() -> None:
    found = load('[proxy]\nrun_dir = "/run/b"\n')
    assert found.driver is not None
    below = (found.shim[0].socket, found.shim[0].runtime_socket, found.driver.run_dir)
    assert all(each.startswith("/run/b/") for each in below)
    assert found.inner_sockets == {"/run/b/shim/csi.sock", "/run/b/driver/csi.sock"}


def test_our_driver_is_served_behind_the_shim_whatever_its_socket_is() -> None:
    found = load("[shim]\nsocket = '/run/o.sock'\n")
    assert found.proxy.drivers[0].backend == found.shim[0].socket == "/run/o.sock"


def test_the_three_programs_settings_files_mean_the_same_as_tables() -> None:
    text = 'log_format = "json"\n'
    for part in ("driver", "shim"):
        lines = (DEPLOY / f"{part}.toml").read_text().replace('log_format = "json"\n', "")
        text += f"[{part}]\n{lines}\n"
    found = load(text)
    assert found.driver is not None
    assert found.log_format == "json"
    assert found.driver.runtime_socket == found.runtime_socket


def test_a_driver_socket_that_is_not_ours_means_that_our_driver_does_not_run() -> None:
    found = load(FOREIGN)
    assert found.driver is None
    assert found.shim[0].wrap
    assert found.inner_sockets == {"/run/crust/shim/csi.sock"}


def test_several_drivers_have_a_shim_each() -> None:
    found = load("""
[[proxy.drivers]]
name = "block.csi.crust.dev"
socket = "/run/a.sock"
backend = "/run/crust/shim/csi.sock"
[[proxy.drivers]]
name = "csi.example.com"
socket = "/run/b.sock"
backend = "/run/crust/shim-b/csi.sock"
[[shim]]
[[shim]]
socket = "/run/crust/shim-b/csi.sock"
driver_socket = "/run/inner.sock"
""")
    assert found.driver is not None
    assert [each.driver_socket for each in found.shim] == [found.driver.socket, "/run/inner.sock"]


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[proxy]\nrun_dri = '/run/x'\n", r"proxy\.run_dri is no setting"),
        ("[driver]\nsocket = 'x'\n", r"driver\.socket must be an absolute path"),
        ("proxies = 1\n", "proxies is no setting"),
        ("shim = 3\n", "shim must be a list"),
        ("driver = 'ours'\n", "driver must be a table"),
        ("[proxy]\nlog_level = 'debug'\n", "log_level is a setting of the process"),
        ("[driver]\ntake_over = true\n", "take_over is a setting of the process"),
        ("[shim]\ncontroller = true\n", "a controller's shim is a process of its own"),
        ("[shim]\nruntime_socket = '/run/o.sock'\n", r"shim\.runtime_socket is '/run/o\.sock'"),
        ("[driver]\nruntime_socket = '/run/o.sock'\n", r"the proxy of this process serves"),
        (FOREIGN + "[driver]\n", "nothing calls the driver at /run/crust/driver/csi.sock"),
        (FOREIGN.replace("/run/crust/shim", "/run/x"), "nothing calls the shim at /run/crust/shim"),
        ("[[shim]]\n[[shim]]\n", "two tables of shim have the socket"),
    ],
)
def test_what_contradicts_itself_is_refused_in_a_sentence(toml: str, why: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=why) as caught:
        load(toml)
    assert "crust node cannot start" in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_the_process_has_the_settings_of_every_daemon() -> None:
    found: Any = load('log_level = "debug"\ntake_over = true\n', CRUST_LOG_FORMAT="json")
    assert (found.log_level, found.take_over, found.log_format) == ("debug", True, "json")


def test_every_setting_of_the_driver_reaches_it() -> None:
    """`crust driver` and `crust node` compose it by one function, which names them one by one."""
    own = set(DriverSettings.model_fields) - set(ProgramSettings.model_fields)
    source = inspect.getsource(serve)
    assert {name for name in own if f".{name}" not in source} == set()


def test_name_of_the_node_is_that_of_driver_and_kubernetes() -> None:
    toml = "[proxy.kubernetes]\nruntime_handlers = ['kata']\n"
    found = load(toml, CRUST_NODE_NAME="node-1")
    assert found.driver is not None
    assert found.proxy.kubernetes is not None
    assert (found.driver.node_id, found.proxy.kubernetes.node_name) == ("node-1", "node-1")
    own = load("[driver]\nnode_id = 'own'\n", CRUST_NODE_NAME="node-1")
    assert own.driver is not None
    assert own.driver.node_id == "own"


def test_empty_name_of_the_node_is_refused() -> None:
    with pytest.raises(loading.InvalidSettings, match="node_name"):
        load(CRUST_NODE_NAME="")
