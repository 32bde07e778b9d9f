"""The values of deploy/helm: wrong ones are refused with the reason, and the schema agrees with the settings."""

import json
from typing import Any

import pytest
import yaml

from crust.blockdriver.settings import DriverSettings
from crust.core.settings.program import ProgramSettings
from tests.support import chart
from tests.support.chart_forms import FORMS

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))
CEPH = "{name: crust-rbd, driverName: rbd.csi.crust.dev, monitors: m, pool: p, user: u, snapshotClass: s}"
CLASS = "{name: c, defer: always, allowVolumeExpansion: false}"
REFUSED = {
    "misspelt": ("{locl: {enabled: true}}", "additional properties 'locl' not allowed"),
    "misspelt-below": ("{local: {single_node: true}}", "'single_node' not allowed"),
    "type": ("{local: {enabled: 'yes'}}", "at '/local/enabled': got string, want boolean"),
    "setting": ("{local: {settings: {overcomit: 2}}}", "'overcomit' not allowed"),
    "range": ("{local: {settings: {overcommit: 0.5}}}", "at '/local/settings/overcommit': minimum"),
    "pool-elsewhere": ("{local: {settings: {state_dir: /mnt}}}", "'state_dir' not allowed"),
    "pool-named-default": (
        "{local: {pools: [{name: default, directory: /mnt}]}}",
        "at '/local/pools/0/name'",
    ),
    "name-of-driver": ("{local: {driverName: Disks_1}}", "at '/local/driverName'"),
    "relative": ("{kubeletRoot: var/lib/kubelet}", "at '/kubeletRoot'"),
    "defer": (
        f"{{local: {{storageClasses: [{CLASS.replace('always', 'perhaps')}]}}}}",
        "at '/local/storageClasses/0/defer'",
    ),
    "immediate": (
        f"{{local: {{storageClasses: [{CLASS.replace('{', '{volumeBindingMode: Immediate, ')}]}}}}",
        "volumeBindingMode",
    ),
    "defer-as-parameter": (
        f"{{local: {{storageClasses: [{CLASS.replace('{', '{parameters: {crust.dev/defer: never}, ')}]}}}}",
        "crust.dev/defer",
    ),
    "limit-left-out": (
        "{local: {volumeAttributesClasses: [{name: gold, readIOPS: '1'}]}}",
        "missing properties 'writeIOPS'",
    ),
    "ceph-without-pool": (
        f"{{ceph: [{CEPH.replace('pool: p, ', '')}]}}",
        "missing property 'pool'",
    ),
    "digest": ("{image: {digest: latest}}", "at '/image/digest'"),
    "no-driver": ("{local: {enabled: false}}", "no driver is served: enable local"),
    "driver-twice": ("{wrapped: [{name: block.csi.crust.dev}]}", "two drivers have one name"),
    "stem-twice": (
        f"{{ceph: [{CEPH.replace('crust-rbd', 'crust')}]}}",
        "objects of two drivers would have one name",
    ),
    "class-twice": (
        f"{{local: {{storageClasses: [{CLASS}, {CLASS}]}}}}",
        "two StorageClasses have one name",
    ),
    "handler": ("{runtimes: [{handler: kata-qemu}]}", "names the runtimeHandler kata"),
    "handler-of-never": (
        f"{{local: {{storageClasses: [{CLASS.replace('always', 'never, runtimeHandler: kata')}]}}}}",
        "never deferred: leave it out",
    ),
    "no-runtime": (
        "{runtimes: [], runtimeClassDecides: true, local: {storageClasses: []}}",
        "runtimes is empty",
    ),
    "expansion": ("{sidecars: {resizer: {enabled: false}}}", "its PVCs would keep their size"),
    "groups-alone": ("{snapshots: {groups: true}}", "snapshots.enabled is not"),
    "groups-of-many-nodes": (
        "{snapshots: {enabled: true, groups: true}}",
        "a group never gets ready; set local.singleNode",
    ),
    "socket-elsewhere": (
        "{wrapped: [{name: csi.example.com, driverSocket: /opt/csi.sock}]}",
        "is not below kubeletRoot or runDir",
    ),
    "long": (f"{{kubeletRoot: /{'long-' * 20}root}}", "is longer than 107 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_value_is_refused_with_its_reason(name: str) -> None:
    values, words = REFUSED[name]
    done = chart.run(values)
    assert done.returncode != 0, done.stdout
    assert words in done.stderr


def keys(values: Any, path: str = "") -> set[str]:
    """The paths of all keys, but none below an object that has no keys of its own in the schema."""
    if not isinstance(values, dict) or not values:
        return {path}
    return {key for name, value in values.items() for key in keys(value, f"{path}/{name}")}


def known(schema: Any, path: str = "") -> set[str]:
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" not in schema or path.endswith("/settings"):
        return {path}
    below = schema["properties"].items()
    return {key for name, value in below for key in known(value, f"{path}/{name}")}


def test_every_value_of_schema_has_a_default() -> None:
    defaults, all_known = keys(VALUES), known(SCHEMA)
    free = {path for path in all_known if any(d.startswith(f"{path}/") for d in defaults)}
    reached = {path for path in defaults if path in all_known} | free
    optional = {"/global", "/controller/podDisruptionBudget/minAvailable"}
    assert all_known - reached == optional


@pytest.mark.parametrize("form", FORMS)
def test_keys_of_further_drivers_are_named_in_a_comment(form: str) -> None:
    """Drivers of others and of Ceph have no default: the comment above the empty list shows each key."""
    text = (chart.CHART / "values.yaml").read_text(encoding="utf-8")
    for part in ("wrapped", "ceph"):
        named = set(SCHEMA["properties"][part]["items"]["properties"])
        comment = text.partition(f"\n{part}: []")[0].rpartition("\n\n")[2]
        assert [key for key in named if f" {key}:" not in comment] == []
        for item in yaml.safe_load(FORMS[form]).get(part, ()):
            assert set(item) <= named


def test_settings_of_the_schema_are_those_of_the_programs() -> None:
    """What the chart leaves to values of its own names is not among them."""
    models = {**ProgramSettings.model_json_schema()["properties"]}
    models |= DriverSettings.model_json_schema()["properties"]
    properties = SCHEMA["properties"]
    settings = [
        properties["node"]["properties"]["settings"],
        properties["local"]["properties"]["settings"],
        properties["local"]["properties"]["pools"]["items"]["properties"]["settings"],
        properties["ceph"]["items"]["properties"]["settings"],
        properties["controller"]["properties"]["settings"],
    ]
    for table in settings:
        for name, described in table["properties"].items():
            assert described.items() <= models[name].items(), name
            assert set(models[name]) - set(described) <= {"title", "description", "default"}
    offered = {name for table in settings for name in table["properties"]}
    written = {
        "log_format", "metrics_address", "driver_name", "socket", "mode", "engine", "rbd", "kubernetes",
        "node_deployment", "state_dir", "pools", "create_pool", "run_dir", "target_roots", "runtime_socket",
        "node_id",
    }  # fmt: skip
    left_out = {"pool_id_file", "check_propagation"}  # as they are by default in a pod of the chart
    assert offered | written | left_out == set(models)
