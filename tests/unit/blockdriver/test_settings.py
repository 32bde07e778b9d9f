"""The driver's settings: what its parts and its engines ask for."""

from typing import Any

import pytest

from crust.blockdriver import settings as driver_settings
from crust.blockdriver.settings import DriverSettings
from crust.core.settings import loading


def driver(**given: Any) -> DriverSettings:
    flags = {"socket": "/run/d.sock", "node_id": "n", **given}
    return loading.load(DriverSettings, "driver", environ={}, flags=flags)


RBD = {"monitors": "v2:192.0.2.1:3300", "pool": "p", "user": "u", "key_file": "/k"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mode": "controller"}, "the pool of the engine files is on one node"),
        ({"mode": "node"}, "on many nodes set node_deployment"),
        ({"mode": "node", "node_deployment": True}, "is its own controller"),
        ({"mode": "controller", "node_deployment": True}, "is its own controller"),
        ({"mode": "both"}, "mode must be"),
        ({"engine": "tape"}, "engine must be"),
        ({"engine": "rbd", "rbd": RBD, "provisioning": "thick"}, "when they are written"),
        ({"engine": "rbd", "rbd": RBD, "pools": {"a": {"state_dir": "/a"}}}, "engine is rbd"),
        ({"pools": {"Fast": {"state_dir": "/a"}}}, "must be a pool's name: small letters"),
        ({"pools": {"default": {"state_dir": "/a"}}}, "is the pool in state_dir"),
        ({"pools": {"a": {"state_dir": "/a", "pool_id_file": "/a/id"}}}, "gone with the pool"),
    ],
)
def test_settings_that_contradict_the_mode_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=why):
        driver(**given)


def test_controller_refuses_settings_of_the_node_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_settings, "LOCAL_ENGINES", frozenset())
    assert driver(mode="controller").mode == "controller"
    with pytest.raises(
        loading.InvalidSettings, match="max_volumes, io_cgroup is of the node service"
    ):
        driver(mode="controller", io_cgroup="/pods", max_volumes=3)


@pytest.mark.parametrize(
    "given", [{}, {"engine": "rbd", "rbd": RBD}, {"engine": "rbd", "rbd": RBD, "mode": "node"}]
)
def test_only_a_controller_of_ceph_volumes_fences(given: dict[str, Any]) -> None:
    with pytest.raises(loading.InvalidSettings, match="only a controller of the engine rbd fences"):
        driver(kubernetes={}, **given)
    made = driver(kubernetes={}, engine="rbd", rbd=RBD, mode="controller")
    assert made.kubernetes is not None
    assert made.kubernetes.kubeconfig == ""


def test_pool_has_its_own_keys_and_those_of_driver() -> None:
    thin = {"state_dir": "/fast", "provisioning": "thin"}
    made = driver(overcommit=3, provisioning="thick", pool_id_file="/id", pools={"fast": thin})
    default, fast = made.by_pool().values()
    assert default == made
    assert (fast.overcommit, fast.provisioning, fast.pool_id_file) == (3, "thin", "")
    assert (fast.state_dir, fast.run_dir) == ("/fast", f"{made.run_dir}/pools/fast")


def test_driver_runs_both_parts_unless_told_otherwise() -> None:
    made = driver()
    assert (made.mode, made.engine, made.node_deployment) == ("all", "files", False)
    assert driver(node_deployment=True).node_deployment
