"""`crust doctor`: the kubelet's directories, and forced detach."""

from dataclasses import replace
from pathlib import Path

import pytest

from crust.cli.doctor.node import Level, Node
from crust.core import errors
from tests.support.nodes.examined_node import DRIVER, HEALTHY, RELEASE, bad, found, write


@pytest.mark.parametrize("where", ["settings", "proxy"])
def test_forced_detach_is_a_warning_for_drivers_that_are_attached(good: Node, where: str) -> None:
    """Our own is not: its CSIDriver has attachRequired: false."""
    ebs = 'name = "ebs.csi.aws.com"\nsocket = "/s"\nbackend = "/b"\n'
    if where == "settings":
        with (good.root / "etc/crust/node.toml").open("a") as toml:
            toml.write(f"[[proxy.drivers]]\n{ebs}")
    else:
        other = replace(DRIVER, name="ebs.csi.aws.com")
        good = replace(good, proxy=replace(HEALTHY, drivers=(DRIVER, other)))
    text = bad(good, "forced-detach", Level.WARNING)
    assert "it concerns ebs.csi.aws.com" in text
    assert "from a node that is not ready" in text
    assert "grep force-detach" in text


def test_forced_detach_of_unknown_drivers_is_a_warning(root: Path) -> None:
    bad(Node(root=root, release=RELEASE), "forced-detach", Level.WARNING)


def test_doctor_settings_of_proxy_count_where_its_unit_is_enabled(good: Node) -> None:
    text = (good.root / "etc/crust/proxy.toml").read_text()
    write(good.root, "etc/crust/proxy.toml", text.replace("/plugins_registry", "/other"))
    assert {finding.level for finding in found(good, "kubelet-registry")} == {Level.OK}
    write(good.root, "etc/systemd/system/multi-user.target.wants/crust-proxy.service")
    assert "/other does not exist" in bad(good, "kubelet-registry", Level.ERROR)


@pytest.mark.parametrize(("state", "level"), [("waiting", Level.WARNING), ("refused", Level.ERROR)])
def test_driver_that_kubelet_has_not_taken_is_not_ok(good: Node, state: str, level: Level) -> None:
    node = replace(good, proxy=replace(HEALTHY, drivers=(replace(DRIVER, registration=state),)))
    assert f"is not registered: {state}" in bad(node, "kubelet-registry", level)


def test_kubelet_on_a_filesystem_without_seals_is_a_warning(good: Node) -> None:
    node = replace(good, has_seals=lambda path: path != good.root / "var/lib/kubelet/pods")
    assert "has no immutable attribute" in bad(node, "kubelet-root", Level.WARNING)


def test_mounts_that_do_not_propagate_are_an_error(good: Node) -> None:
    def refuse(path: str) -> None:
        raise errors.NotReady.named("MountsNotPropagated", path, why="a slave", hint="share")

    node = replace(good, check_propagation=refuse)
    assert "[MountsNotPropagated]" in bad(node, "mount-propagation", Level.ERROR)
