"""What a driver writes into its log (C-601)."""

from crust.conformance.case import CREATE, NODE, case
from crust.conformance.co import Co
from crust.wire.csi.v1 import csi_pb2


@case(601, CREATE, NODE, "option.log")
def test_no_secret_is_in_the_log(co: Co) -> None:
    """Secrets Requirements: neither secrets, nor tokens in volume_context, nor mount flags, when calls
    pass and when they fail.
    """
    assert co.options.log is not None
    before = co.options.log.stat().st_size
    planted = [co.name("planted") for _ in range(4)]
    create = co.create_request()
    create.secrets["password"] = planted[0]
    volume = co.create(create)
    co.attach(volume)
    stage = co.stage_request(volume)
    stage.secrets["password"] = planted[1]
    co.undo(lambda: co.unstage(volume))
    if "node.STAGE_UNSTAGE_VOLUME" in co.has:
        co.ask(co.node.NodeStageVolume, stage)
    target = co.target()
    co.will_unpublish(volume.volume_id, target)
    publish = co.publish_request(volume, target)
    publish.secrets["password"] = planted[2]
    publish.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = planted[3]
    co.ask(co.node.NodePublishVolume, publish)
    _fail_on_purpose(co, publish, planted)
    with co.options.log.open("rb") as file:
        file.seek(before)
        written = file.read()
    found = [each for each in planted if each.encode() in written]
    assert not found, f"{len(found)} of {len(planted)} planted secrets are in the log"


def _fail_on_purpose(co: Co, publish: csi_pb2.NodePublishVolumeRequest, planted: list[str]) -> None:
    """Refusals are logged by other lines than successes; mount flags may be credentials."""
    create = co.create_request()
    create.name = ""
    create.secrets["password"] = planted[0]
    co.outcome(co.controller.CreateVolume, create)
    planted.append(co.name("planted"))
    publish.volume_capability.mount.mount_flags.append(f"password={planted[-1]}")
    publish.target_path = str(co.target())
    co.will_unpublish(publish.volume_id, co.target())
    co.outcome(co.node.NodePublishVolume, publish)
