"""The table [cluster]: what is accepted, and that what is not is said without its value."""

from typing import Any

import pydantic
import pytest

from crust.cli.programs import daemons
from crust.cluster.agent import REPEAT_EVERY_S
from crust.settings import loading
from crust.settings.cluster import ClusterSettings
from crust.settings.driver import DriverSettings

GIVEN: dict[str, Any] = {
    "endpoints": ("10.0.0.1:2379", "etcd-2.example:2379", "[fd00::3]:2379"),
    "ca": "/etc/crust/etcd/ca.crt",
    "cert": "/etc/crust/etcd/node.crt",
    "key": "/etc/crust/etcd/node.key",
}


def test_cluster_settings_need_endpoints_and_tls_files_alone() -> None:
    found = ClusterSettings.model_validate(GIVEN)
    assert (found.kind, found.prefix, found.lease_s) == ("etcd", "/crust/", 15)
    assert found.settle_s > max(found.lease_s, REPEAT_EVERY_S)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"endpoints": ()}, "endpoints is empty, and needs at least one"),
        ({"endpoints": ("https://10.0.0.1:2379",)}, "endpoints.0 must be host:port"),
        ({"prefix": "/crust"}, "prefix must be names between slashes"),
        ({"prefix": "/"}, "prefix must be names between slashes"),
        ({"ca": "ca.crt"}, "ca must be an absolute path"),
        ({"lease_s": 2}, "lease_s must be greater than or equal to 3"),
        ({"password": "x"}, "password is no setting"),
    ],
)
def test_cluster_settings_refuse_what_cannot_be_meant(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        ClusterSettings.model_validate({**GIVEN, **changed})
    assert loading.reasons(refused.value).startswith(why)


def driver(**given: Any) -> DriverSettings:
    """Settings of `crust driver` in a cluster."""
    merged = {"socket": "/s", "node_id": "n1", "cluster": GIVEN, **given}
    return loading.load(DriverSettings, "driver", environ={}, flags=merged)


@pytest.mark.parametrize("mode", ["node", "controller"])
def test_driver_in_a_cluster_is_a_node_or_the_controller(mode: str) -> None:
    assert driver(mode=mode).cluster is not None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mode": "all"}, "cluster is set, and mode is all"),
        ({"mode": "controller", "max_volumes": 3}, "max_volumes is of the node part"),
        ({"mode": "controller", "cluster": None}, "set cluster, to reach the nodes through it"),
        ({"mode": "node", "cluster": None}, "nobody can create a volume; set cluster, or mode all"),
        ({"mode": "controller", "overcommit": 2}, "each node counts its own pool, set it there"),
    ],
)
def test_driver_settings_that_contradict_the_cluster_are_refused(
    given: dict[str, Any], why: str
) -> None:
    with pytest.raises(loading.InvalidSettings, match=why):
        driver(**given)


def test_cluster_flags_become_the_table() -> None:
    flags = {
        "cluster": "etcd",
        "cluster_endpoint": ("a:1",),
        "cluster_ca": "/ca",
        "cluster_cert": "/cert",
        "cluster_key": "/key",
        "mode": "node",
    }
    table = daemons.cluster(flags)
    assert flags == {"mode": "node"}
    assert table == {
        "kind": "etcd",
        "endpoints": ("a:1",),
        "ca": "/ca",
        "cert": "/cert",
        "key": "/key",
    }
    absent = dict.fromkeys(("cluster", "cluster_ca", "cluster_cert", "cluster_key"))
    assert daemons.cluster({**absent, "cluster_endpoint": ()}) is None
