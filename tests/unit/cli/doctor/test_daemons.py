"""`crust doctor`: the settings, the sockets and the answers of the daemons."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from crust.cli.doctor.node import Level, Node
from crust.core import errors
from crust.inspection import show, views
from crust.inspection.views import ProxyAnswer
from tests.support.nodes.examined_node import DRIVER, HEALTHY, bad, found, write


def test_doctor_sockets_are_those_of_drivers_that_proxy_has(good: Node) -> None:
    other = replace(DRIVER, name="other.csi", socket="/run/other.sock")
    (finding,) = found(replace(good, proxy=replace(HEALTHY, drivers=(other,))), "sockets")
    assert "/run/other.sock" in finding.what
    assert "block.csi.crust.dev" not in finding.what


def test_unknown_setting_is_an_error_with_its_name(good: Node) -> None:
    write(good.root, "etc/crust/shim.toml", 'socket = "/a"\ndriver_socket = "/b"\nfoo = 1\n')
    text = bad(good, "settings", Level.ERROR)
    assert "/etc/crust/shim.toml is refused" in text
    assert "foo" in text


def test_settings_that_others_can_write_are_an_error(good: Node) -> None:
    (good.root / "etc/crust/proxy.toml").chmod(0o666)
    assert "chmod go-w /etc/crust/proxy.toml" in bad(good, "settings", Level.ERROR)


def test_node_without_settings_is_a_warning(root: Path) -> None:
    bad(Node(root=root), "settings", Level.WARNING)


@pytest.mark.parametrize(
    ("program", "old", "new", "words"),
    [
        ("shim", 'socket = "/run/crust/shim', 'socket = "/run/x', "nothing calls the shim at /run/x"),
        ("driver", 'socket = "/run/crust/driver', 'socket = "/run/x', "nothing calls the driver at /run/x"),
        ("driver", "/run/crust/runtime.sock", "/run/x.sock", "runtime_socket of a driver is '/run/x"),
    ],
)  # fmt: skip
def test_sockets_that_do_not_match_are_an_error(
    good: Node, program: str, old: str, new: str, words: str
) -> None:
    file = good.root / f"etc/crust/{program}.toml"
    text = file.read_text()
    file.write_text(text.replace(old, new, 1))
    assert words in bad(good, "sockets-match", Level.ERROR)


def test_sockets_are_served_or_stale_or_missing(good: Node) -> None:
    run = good.root / "run/crust"
    run.mkdir(parents=True)
    run.chmod(0o777)
    assert "chmod go= /run/crust" in bad(good, "sockets", Level.ERROR), "and not: remove it"
    run.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as served, socket.socket(socket.AF_UNIX) as left:
        served.bind(str(good.root / "run/crust/runtime.sock"))
        served.listen()
        left.bind(str(good.root / "run/crust/handlers.sock"))
        for path in run.iterdir():
            path.chmod(0o600)
        levels = [finding.level for finding in found(good, "sockets")]
        text = " ".join(f"{finding.what} {finding.why}" for finding in found(good, "sockets"))
    assert levels == [Level.OK, Level.ERROR, Level.ERROR]
    assert "the socket is stale" in text
    assert "inspect.sock" in text


@pytest.mark.parametrize("name", ["handlers.sock", "volumes"])
def test_socket_that_other_users_can_open_is_an_error(good: Node, name: str) -> None:
    path = write(good.root, f"run/crust/{name}")
    path.chmod(0o666)
    assert f"/run/crust/{name} has mode 0666" in bad(good, "sockets", Level.ERROR)
    path.chmod(0o600)
    assert not any("mode" in finding.what for finding in found(good, "sockets"))


def test_proxy_that_is_away_is_one_error(good: Node) -> None:
    node = replace(good, proxy=errors.PeerUnavailable("no proxy", why="down", hint="start it"))
    assert "no proxy" in bad(node, "proxy", Level.ERROR)
    assert [found(node, name) for name in ("drivers", "versions", "handlers")] == [(), (), ()]


LOW = views.Pool(1000, 500, 900, 0, 100)
FULL = replace(LOW, allocated_bytes=999)
UNREADABLE = views.VolumeRow(
    *("", "", "", "", "", "", "", ""), readonly=False, capacity_bytes=0, state="unreadable", sandbox_id="",
    claimed_by_pid=0, claimed_at=None, published_at=None, decided_by="", entry="0a", message="not JSON",
)  # fmt: skip
HANGS = replace(LOW, free_bytes=500, conditions=(views.Problem("operations", "X", "hang"),))


@pytest.mark.parametrize(
    ("name", "answered", "level"),
    [
        ("proxy", replace(HEALTHY, problems=(views.Problem("threads", "X", "hangs"),)), Level.ERROR),
        ("proxy", replace(HEALTHY, volumes=(UNREADABLE,)), Level.ERROR),
        ("proxy", replace(HEALTHY, warnings=(views.Problem("groups", "X", "/agent"),)), Level.WARNING),
        ("drivers", replace(HEALTHY, drivers=(replace(DRIVER, state="not-ready"),)), Level.ERROR),
        ("drivers", replace(HEALTHY, drivers=(replace(DRIVER, pool=HANGS),)), Level.ERROR),
        ("drivers", replace(HEALTHY, drivers=(replace(DRIVER, pool=FULL),)), Level.ERROR),
        ("drivers", replace(HEALTHY, drivers=(replace(DRIVER, pool=LOW),)), Level.WARNING),
        ("versions", replace(HEALTHY, version="0.0.1"), Level.WARNING),
        ("versions", replace(HEALTHY, drivers=(replace(DRIVER, version="9"),)), Level.WARNING),
        ("versions", replace(HEALTHY, drivers=(replace(DRIVER, shim_version="0.0.1"),)), Level.WARNING),
        ("handlers", replace(HEALTHY, handlers=()), Level.ERROR),
    ],
)  # fmt: skip
def test_condition_that_the_proxy_reports_is_a_finding(
    good: Node, name: str, answered: ProxyAnswer, level: Level
) -> None:
    bad(replace(good, proxy=answered), name, level)
    assert show.of_node(answered).healthy == (level is not Level.ERROR), "as `crust status` says"
