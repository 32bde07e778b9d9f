"""Every object that crust reads, as Kubernetes' own Go types write it."""

import pytest

from crust.kubernetes_api.objects import Pod
from tests.support.nodes.fake_kubernetes import recorded
from tests.support.nodes.recorded_server import FILES, LISTS, OBJECTS, UID, Server, kind_of, watched


def test_all_recorded_objects_are_read_by_a_test() -> None:
    others = {"status-forbidden", "status-gone", "watch-bookmark"}
    assert {*OBJECTS, *LISTS, *others} == set(FILES)


@pytest.mark.parametrize("name", OBJECTS)
async def test_recorded_object_is_read_alone_listed_and_watched(server: Server, name: str) -> None:
    kind, written = kind_of(name), recorded(name)
    server.say(written)
    read = await server.api.get(kind, written["metadata"]["name"])
    assert read is not None
    assert read.metadata.name == written["metadata"]["name"]
    assert read.metadata.uid == UID
    server.say({"kind": f"{written['kind']}List", "metadata": {}, "items": [written]})
    assert (await server.api.listing(kind))[0] == (read,)
    server.say(recorded("watch-bookmark"), {"type": "ADDED", "object": written})
    assert await watched(server, kind) == [read]


@pytest.mark.parametrize("name", LISTS)
async def test_recorded_list_is_read_with_its_version(server: Server, name: str) -> None:
    written = recorded(name)
    server.say(written)
    objects_of_kind, version = await server.api.listing(kind_of(name))
    assert len(objects_of_kind) == len(written["items"] or [])
    assert version == written["metadata"]["resourceVersion"]


@pytest.mark.parametrize("name", OBJECTS)
async def test_each_field_may_be_null_or_absent(server: Server, name: str) -> None:
    """What a later version of Go's types leaves out, or writes as null, is the zero value."""
    kind, written = kind_of(name), recorded(name)
    for key in ("spec", "status", "handler"):
        for lesser in ({**written, key: None}, {k: v for k, v in written.items() if k != key}):
            server.say(lesser)
            assert await server.api.get(kind, written["metadata"]["name"]) is not None
    for part in ("spec", "status"):
        for key in written.get(part, {}):
            server.say({**written, part: {**written[part], key: None}})
            assert await server.api.get(kind, written["metadata"]["name"]) is not None


WHOLE, PART = {"name": "data"}, {"name": "data", "subPath": "a"}
OTHER = {"name": "config", "subPath": "nginx.conf"}
CLAIM = {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}


@pytest.mark.parametrize(
    ("mounts", "volumes", "takes"),
    [
        ([PART], [CLAIM], True),
        ([WHOLE, PART], [CLAIM], True),
        ([{"name": "data", "subPathExpr": "$(POD)"}], [CLAIM], True),
        ([WHOLE], [CLAIM], False),
        ([WHOLE, OTHER], [CLAIM, {"name": "config", "configMap": {}}], False),
        ([PART], [CLAIM, {"name": "more", "ephemeral": {}}], False),
        ([OTHER], [{"name": "config", "configMap": {}}], False),
    ],
)
def test_pod_takes_sub_paths_if_each_csi_volume_has_one(
    mounts: list[dict[str, str]], volumes: list[dict[str, object]], *, takes: bool
) -> None:
    for kind in ("containers", "initContainers"):
        spec = {kind: [{"volumeMounts": mounts}], "volumes": volumes}
        assert Pod.model_validate({"spec": spec}).spec.takes_sub_paths is takes
