"""The CSIDriver object against the configuration: all four combinations, with and without an object."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.cli.doctor import csi_driver_objects
from crust.core.deferral_keys import Defer
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api import csi_driver
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.csi_driver import Configuration
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes

OURS, THEIRS = "block.csi.crust.dev", "csi.example.com"
ATTACH, POD_INFO = "attachRequired", "podInfoOnMount"


@pytest.fixture
def api() -> FakeKubernetes:
    return FakeKubernetes()


@pytest_asyncio.fixture
async def client(api: FakeKubernetes, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    api.add_object("csidrivers", "other", spec={})
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        made = kubernetes_api.client(kubeconfig)
        yield made
        await made.close()


def running(
    *, attaches: bool | None, default: Defer | None = None, runtime_class: bool = True
) -> Configuration:
    return Configuration(runtime_class=runtime_class, default=default, attaches=attaches)


@pytest.mark.parametrize(
    ("attach_required", "pod_info", "attaches", "expected"),
    [
        (True, True, True, {}),
        (True, True, False, {ATTACH: False}),
        (True, False, True, {POD_INFO: False}),
        (True, False, False, {POD_INFO: False, ATTACH: False}),
        (False, True, True, {ATTACH: False}),
        (False, True, False, {}),
        (False, False, True, {POD_INFO: False, ATTACH: False}),
        (False, False, False, {POD_INFO: False}),
    ],
)
async def test_each_combination_is_compared_with_the_configuration(
    client: KubernetesApi,
    api: FakeKubernetes,
    *,
    attach_required: bool,
    pod_info: bool,
    attaches: bool,
    expected: dict[str, bool],
) -> None:
    """The value says whether volumes do not get to their pods."""
    api.add_object("csidrivers", THEIRS, spec={ATTACH: attach_required, POD_INFO: pod_info})
    found = await csi_driver_objects.read(client, THEIRS)
    assert (found.attach_required, found.pod_info_on_mount) == (attach_required, pod_info)
    mismatches = csi_driver.mismatches(found, running(attaches=attaches))
    assert {each.what.partition(" ")[0]: each.is_fatal for each in mismatches} == expected
    for each in mismatches:
        assert THEIRS in each.what
        assert each.why
        assert "spec." in each.todo


async def test_absent_object_has_kubernetes_defaults_and_says_so(client: KubernetesApi) -> None:
    found = await csi_driver_objects.read(client, THEIRS)
    assert (found.exists, found.attach_required, found.pod_info_on_mount) == (False, True, False)
    mismatches = csi_driver.mismatches(found, running(attaches=False))
    assert len(mismatches) == 2
    assert all("no CSIDriver object" in each.why for each in mismatches)


async def test_api_that_refuses_is_unavailable(client: KubernetesApi, api: FakeKubernetes) -> None:
    api.faults.status = 403
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="CSIDriver"):
        await csi_driver_objects.read(client, THEIRS)


def test_missing_pod_info_is_fatal_where_the_runtime_class_decides_by_default() -> None:
    found = csi_driver.CsiDriverObject(THEIRS, exists=True, attach_required=False)
    default = running(attaches=False, default=Defer.RUNTIME_CLASS)
    (mismatch,) = csi_driver.mismatches(found, default)
    assert mismatch.is_fatal
    assert "every publish" in mismatch.why


def test_pod_info_is_not_needed_where_no_runtime_class_decides() -> None:
    found = csi_driver.CsiDriverObject(THEIRS, exists=True, attach_required=False)
    assert csi_driver.mismatches(found, running(attaches=None, runtime_class=False)) == ()


def test_our_driver_takes_volumes_with_and_without_attach() -> None:
    for attach_required in (False, True):
        found = csi_driver.CsiDriverObject(
            OURS, exists=True, attach_required=attach_required, pod_info_on_mount=True
        )
        assert csi_driver.mismatches(found, running(attaches=True)) == ()


def test_unknown_controller_says_nothing_of_attach() -> None:
    for attach_required in (False, True):
        found = csi_driver.CsiDriverObject(
            THEIRS, exists=True, attach_required=attach_required, pod_info_on_mount=True
        )
        assert csi_driver.mismatches(found, running(attaches=None)) == ()
