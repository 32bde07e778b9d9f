"""CreateVolume, DeleteVolume, ValidateVolumeCapabilities (C-101 to C-117, C-121 to C-125)."""

from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.options import MIB
from crust_conformance.orchestrator.calls import UNKNOWN, Code, Refusal, check_code
from crust_conformance.orchestrator.capabilities import CONSTRAINTS
from crust_conformance.orchestrator.co import SIDECAR_KEYS, Co
from crust_conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, Mode, block, mount

_ODD_NAMES = (
    *("a/b", "a_b", "..", "../../etc", "ä ö ü", "名前", "🦀"),
    *("A", "a", "%2e", "a\tb", "-rf", "*"),
)


def test_c101_create_needs_a_name_and_capabilities(co: Co) -> None:
    co.refused_without(co.create_request(), "name", "volume_capabilities")
    typeless = co.create_request(VolumeCapability(access_mode=co.mount.access_mode))
    modeless = co.create_request(VolumeCapability(mount=co.mount.mount))
    modeless.volume_capabilities[0].access_mode.mode = Mode.UNKNOWN
    for request in (typeless, modeless):
        _refused(co, request)


def test_c102_a_volume_has_an_id_and_the_size_that_was_asked_for(co: Co) -> None:
    request = co.create_request()
    request.capacity_range.limit_bytes = 2 * request.capacity_range.required_bytes
    volume = co.create(request)
    assert volume.volume_id
    has_place = bool(volume.accessible_topology)
    assert not has_place or CONSTRAINTS in co.has, f"a volume has a topology without {CONSTRAINTS}"
    if volume.capacity_bytes:
        size_range = request.capacity_range
        assert size_range.required_bytes <= volume.capacity_bytes <= size_range.limit_bytes


def test_c103_create_again_is_the_same_volume(co: Co) -> None:
    request = co.create_request()
    first, second = co.create(request), co.create(request)
    assert first.volume_id == second.volume_id
    assert first.volume_context == second.volume_context


def test_c104_create_again_differently_is_refused(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    size = volume.capacity_bytes or request.capacity_range.required_bytes
    request.capacity_range.required_bytes = 2 * size
    unsized = () if volume.capacity_bytes else (Code.OK,)
    co.answered(request, Code.ALREADY_EXISTS, *unsized)


def test_c105_an_unknown_parameter_is_refused(co: Co) -> None:
    request = co.create_request()
    request.parameters["crust-conformance-unknown"] = "1"
    _refused(co, request)


def test_c106_the_keys_of_sidecars_are_tolerated(co: Co) -> None:
    request = co.create_request()
    request.parameters.update(SIDECAR_KEYS)
    request.secrets["another-driver's"] = "secret"
    co.create(request)


def test_c107_a_name_may_have_128_bytes(co: Co) -> None:
    long, short = co.name().ljust(128, "x"), co.name()
    wide = short + "x" * (len(short) % 2) + "ü" * ((128 - len(short)) // 2)
    volumes = [co.create(co.create_request(name=name)) for name in (long, wide)]
    assert len({volume.volume_id for volume in volumes}) == 2
    with co.beyond():
        _refused(co, co.create_request(name=long + "x"))


def test_c108_a_name_may_be_any_unicode(co: Co) -> None:
    suffix = co.name("")
    requests = [co.create_request(name=f"{name}{suffix}") for name in _ODD_NAMES]
    volumes = [co.create(request) for request in requests]
    assert len({volume.volume_id for volume in volumes}) == len(_ODD_NAMES)
    for request, volume in zip(requests, volumes, strict=True):
        assert co.create(request).volume_id == volume.volume_id


def test_c109_a_name_has_no_control_characters(co: Co) -> None:
    for odd in ("\0", "\x08", "\x0b", "\x0c", "\x0e", "\x1f", "\x7f", "\x85", "\x9f"):
        _refused(co, co.create_request(name=f"{co.name()}{odd}"))


def test_c110_a_map_has_at_most_4_kib(co: Co) -> None:
    request = co.create_request()
    for number in range(40):
        request.parameters[f"csi.storage.k8s.io/pvc/{number}"] = "x" * 120
    _refused(co, request)


def test_c111_create_with_impossible_size_is_refused(co: Co) -> None:
    contrary = co.create_request()
    contrary.capacity_range.limit_bytes = contrary.capacity_range.required_bytes - 1
    negative = co.create_request()
    negative.capacity_range.required_bytes = -1
    for request in (contrary, negative):
        _refused(co, request, Code.OUT_OF_RANGE, Code.INVALID_ARGUMENT)
    exabyte = co.create_request(size_bytes=1 << 60)
    code = co.answered(exabyte, Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
    if code is Code.OK:
        return
    exabyte.capacity_range.required_bytes = co.options.parameters.size_bytes
    co.create(exabyte)


def test_c115_create_again_with_other_capability_is_refused_or_confirmed(co: Co) -> None:
    request = co.create_request(co.mount)
    volume = co.create(request)
    del request.volume_capabilities[:]
    request.volume_capabilities.append(block())
    if co.answered(request, Code.OK, Code.ALREADY_EXISTS) is Code.OK:
        assert _is_confirmed(co, volume, block())


def test_c116_a_size_is_rounded_up_and_never_above_the_limit(co: Co) -> None:
    size = co.options.parameters.size_bytes
    odd = co.create(co.create_request(size_bytes=size + 1)).capacity_bytes
    assert odd == 0 or odd > size
    limited = co.create_request()
    limited.capacity_range.CopyFrom(csi_pb2.CapacityRange(limit_bytes=2 * size))
    assert co.create(limited).capacity_bytes <= 2 * size
    narrow = co.create_request()
    narrow.capacity_range.CopyFrom(
        csi_pb2.CapacityRange(required_bytes=size + 1, limit_bytes=size + 2)
    )
    reply = co.reply(narrow)
    if isinstance(reply, Refusal):
        check_code(narrow, reply.code, Code.OK, Code.OUT_OF_RANGE)
    else:
        assert reply.volume.capacity_bytes in (0, size + 1, size + 2)


def test_c117_volume_context_is_constant(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    co.release(volume, co.use(volume))
    assert co.create(request).volume_context == volume.volume_context


def test_c125_access_mode_is_refused_or_confirmed(co: Co) -> None:
    for mode in Mode.Mode.values():
        if mode == Mode.UNKNOWN:
            continue
        request = co.create_request(mount(co.mount.mount.fs_type, mode))
        reply = co.reply(request)
        if isinstance(reply, Refusal):
            asked = f" for {Mode.Mode.Name(mode)}"
            check_code(request, reply.code, Code.OK, Code.INVALID_ARGUMENT, asked=asked)
        else:
            assert _is_confirmed(co, reply.volume, request.volume_capabilities[0])


def _refused(co: Co, request: csi_pb2.CreateVolumeRequest, *codes: Code) -> None:
    co.answered(request, *(codes or (Code.INVALID_ARGUMENT,)))


def _is_confirmed(co: Co, volume: Volume, capability: VolumeCapability) -> bool:
    request = co.validate_request(volume, capability)
    return co.ask(request).HasField("confirmed")


def test_c112_delete_is_idempotent(co: Co) -> None:
    volume = co.volume()
    for volume_id in (volume.volume_id, volume.volume_id, UNKNOWN):
        co.delete(volume_id)
    co.refused_without(co.delete_request(UNKNOWN), "volume_id")


def test_c113_a_deleted_volume_is_gone_and_its_name_is_free(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    co.delete(volume.volume_id)
    validate = co.validate_request(volume, co.mount)
    co.answered(validate, Code.NOT_FOUND)
    request.capacity_range.required_bytes += 16 * MIB
    co.create(request)


def test_c114_a_volume_in_use_is_not_deleted(co: Co) -> None:
    volume, target = co.used(file=b"kept")
    request = co.delete_request(volume.volume_id)
    code, _ = co.outcome(request)
    with co.beyond():
        assert code is not Code.OK, "a volume that is published was deleted"
    if code is Code.OK:
        return
    check_code(request, code, Code.FAILED_PRECONDITION)
    assert co.file(target) == b"kept"


def test_c121_validate_needs_a_volume_and_capabilities(co: Co) -> None:
    request = co.validate_request(co.volume(), co.mount)
    co.refused_without(request, "volume_id", "volume_capabilities")
    co.refused_with_unknown(request, "volume_id")


def test_c122_validate_confirms_what_was_created(co: Co) -> None:
    volume = co.volume()
    request = co.validate_request(volume, co.mount)
    request.volume_context.update(volume.volume_context)
    request.parameters.update(co.options.parameters.parameters)
    answer = co.ask(request)
    assert answer.HasField("confirmed"), f"it is not confirmed, with the message {answer.message!r}"
    assert co.mount in answer.confirmed.volume_capabilities
    assert dict(answer.confirmed.volume_context) in ({}, dict(volume.volume_context))
    assert dict(answer.confirmed.parameters) in ({}, co.options.parameters.parameters)


def test_c123_validate_confirms_all_or_nothing(co: Co) -> None:
    request = co.validate_request(co.volume(), co.mount)
    request.volume_context["crust-conformance"] = "not the volume's"
    answer = co.ask(request)
    assert not answer.HasField("confirmed")
    assert answer.message


def test_c124_validate_confirms_every_capability_or_none(co: Co) -> None:
    answer = co.ask(co.validate_request(co.volume(), co.mount, mount(NO_FILESYSTEM)))
    assert not answer.HasField("confirmed")
    with co.beyond():
        assert answer.message, "there is no message"
