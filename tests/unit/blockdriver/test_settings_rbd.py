"""The table [rbd]: a node may leave out user and key file, nobody else; and what the engine is then."""

from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver import serve
from crust.blockdriver.settings import DriverSettings
from crust.core.settings import loading
from tests.support.raised import raised

PLACE = {"monitors": "[v2:192.0.2.1:3300,v1:192.0.2.1:6789]", "pool": "kubernetes"}
USER = {"user": "crust", "key_file": "/etc/crust/blockdriver/ceph.key"}


def driver(mode: str, **rbd: str) -> DriverSettings:
    flags: dict[str, Any] = {"socket": "/s", "node_id": "n1", "engine": "rbd", "mode": mode}
    flags["rbd"] = {**PLACE, **rbd}
    return loading.load(DriverSettings, "driver", environ={}, flags=flags)


@pytest.mark.parametrize("mode", ["all", "controller"])
def test_user_with_its_key_file_goes_with_each_mode(mode: str) -> None:
    table = driver(mode, **USER).rbd
    assert table is not None
    assert table.user == "crust"


@pytest.mark.parametrize(
    ("mode", "given", "why"),
    [
        ("all", {}, "mode is all: only to a node calls bring keys"),
        ("controller", {}, "mode is controller: only to a node calls bring keys"),
        ("node", USER, "a node keeps no key"),
        ("node", {"user": "crust"}, "set both or none"),
        ("node", {"key_file": "/etc/crust/blockdriver/ceph.key"}, "set both or none"),
    ],
)
def test_half_a_user_is_refused(mode: str, given: dict[str, str], why: str) -> None:
    with pytest.raises(loading.InvalidSettings, match=why):
        driver(mode, **given)


def test_node_without_user_has_engine_that_calls_open(tmp_path: Path) -> None:
    its = driver("node").model_copy(update={"run_dir": str(tmp_path)})
    assert serve.driver_of(its).stores.provisioning.place.is_lent  # type: ignore[attr-defined]
    assert its.rbd is not None
    table = its.rbd.model_copy(update={"monitors": "192.0.2.1"})
    with raised("MonitorsInvalid"):
        serve.driver_of(its.model_copy(update={"rbd": table}))
