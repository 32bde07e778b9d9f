"""What the driver is asked in the place of the original request."""

from crust.csi_shim.wrap import as_block
from tests.support.wrapped_volume import PATHS, publish


def test_publish_as_block_differs_in_nothing_else() -> None:
    context = {"crust.dev/defer": "always", "csi.storage.k8s.io/pod.name": "p", "vendor": "1"}
    request = publish(
        context=context, readonly=True, defer=True, secrets={"a": "b"},
        publish_context={"devicePath": "/dev/x"},
    )  # fmt: skip
    block = as_block.publish_request(request, PATHS, staged=True)
    assert block.volume_capability.WhichOneof("access_type") == "block"
    assert not block.defer_fs_ops
    assert not block.readonly
    assert (block.target_path, block.staging_target_path) == (
        PATHS.leaf(request.target_path), PATHS.staging,
    )  # fmt: skip
    assert dict(block.volume_context) == {"csi.storage.k8s.io/pod.name": "p", "vendor": "1"}
    for name in ("target_path", "staging_target_path", "readonly", "defer_fs_ops"):
        block.ClearField(name)
        request.ClearField(name)
    block.volume_capability.mount.CopyFrom(request.volume_capability.mount)
    block.volume_context["crust.dev/defer"] = "always"
    assert block == request


def test_stage_made_of_publish_has_no_data_of_pod() -> None:
    context = {"csi.storage.k8s.io/pod.name": "p", "vendor": "1", "crust.dev/defer": "never"}
    stage = as_block.stage_of(publish(context=context, secrets={"a": "b"}))
    assert dict(stage.volume_context) == {"vendor": "1", "crust.dev/defer": "never"}
    assert not stage.secrets
