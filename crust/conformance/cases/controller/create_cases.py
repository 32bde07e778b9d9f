"""CreateVolume (C-101 to C-111, C-115 to C-117, C-125)."""

from crust.conformance.case import BLOCK, CREATE, NODE, beyond, case, must
from crust.conformance.orchestrator.calls import Code, Refusal
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import Mode, block, mount
from crust.wire.csi.v1 import csi_pb2

_ODD_NAMES = (
    "a/b",
    "a_b",
    "..",
    "../../etc",
    "ä ö ü",
    "名前",
    "🦀",
    "A",
    "a",
    "%2e",
    "a\tb",
    "-rf",
    "*",
)


@case(101, CREATE)
@must(
    "Error Scheme",
    "a missing required field MUST be INVALID_ARGUMENT; name, volume_capabilities, "
    "access_type and access_mode are REQUIRED",
)
def test_create_needs_a_name_and_capabilities(co: Co) -> None:
    """CreateVolume: a missing name, capability, access type or access mode is INVALID_ARGUMENT."""
    nameless = co.create_request()
    nameless.name = ""
    incapable = co.create_request()
    del incapable.volume_capabilities[:]
    typeless = co.create_request(csi_pb2.VolumeCapability(access_mode=co.mount.access_mode))
    modeless = co.create_request(csi_pb2.VolumeCapability(mount=co.mount.mount))
    modeless.volume_capabilities[0].access_mode.mode = Mode.UNKNOWN
    for request in (nameless, incapable, typeless, modeless):
        _refused(co, request)


@case(102, CREATE)
@must(
    "CreateVolume",
    "volume_id is REQUIRED; capacity_range MUST always be honored; a capacity of 0 is unknown",
)
def test_a_volume_has_an_id_and_the_size_that_was_asked_for(co: Co) -> None:
    """CreateVolume: an id, and a capacity of 0 (unknown) or within required_bytes and limit_bytes."""
    request = co.create_request()
    request.capacity_range.limit_bytes = 2 * request.capacity_range.required_bytes
    volume = co.create(request)
    assert volume.volume_id
    if volume.capacity_bytes:
        wanted = request.capacity_range
        assert wanted.required_bytes <= volume.capacity_bytes <= wanted.limit_bytes


@case(103, CREATE)
@must(
    "CreateVolume",
    "this operation MUST be idempotent: the same name and arguments, the same volume",
)
def test_create_again_is_the_same_volume(co: Co) -> None:
    """CreateVolume: idempotent by name."""
    request = co.create_request()
    first, again = co.create(request), co.create(request)
    assert first.volume_id == again.volume_id
    assert first.volume_context == again.volume_context


@case(104, CREATE)
@must(
    "CreateVolume Errors",
    "a volume of this name that is incompatible with capacity_range MUST be ALREADY_EXISTS",
)
def test_create_again_differently_is_refused(co: Co) -> None:
    """CreateVolume: a name that exists with another capacity, if it is known, is ALREADY_EXISTS."""
    request = co.create_request()
    volume = co.create(request)
    size = volume.capacity_bytes or request.capacity_range.required_bytes
    request.capacity_range.required_bytes = 2 * size
    unsized = () if volume.capacity_bytes else (Code.OK,)
    co.refused(co.controller.CreateVolume, request, Code.ALREADY_EXISTS, *unsized)


@case(105, CREATE)
@beyond(
    "CreateVolume",
    "the plugin is responsible for validating parameters; whether it refuses unknown ones "
    "is left open",
)
def test_an_unknown_parameter_is_refused(co: Co) -> None:
    """CreateVolume: a parameter that the driver does not know is INVALID_ARGUMENT."""
    request = co.create_request()
    request.parameters["crust-conformance-unknown"] = "1"
    _refused(co, request)


@case(106, CREATE)
@beyond(
    "CreateVolume",
    "parameters are opaque to CSI; external-provisioner adds its own, and a CO MAY pass the "
    "same secrets to all RPCs",
)
def test_the_keys_of_sidecars_are_tolerated(co: Co) -> None:
    """CreateVolume: external-provisioner's csi.storage.k8s.io/ keys and unknown secrets do no harm."""
    request = co.create_request()
    request.parameters["csi.storage.k8s.io/pvc/name"] = "data"
    request.parameters["csi.storage.k8s.io/pvc/namespace"] = "default"
    request.parameters["csi.storage.k8s.io/pv/name"] = "pvc-1"
    request.secrets["another-driver's"] = "secret"
    co.create(request)


@case(107, CREATE)
@must(
    "CreateVolume",
    "any Unicode string that conforms to the length limit (128 bytes) is allowed as a name",
)
@beyond(
    "Size Limits",
    "fields SHALL NOT exceed 128 bytes, a CO's too; that a plugin refuses longer ones is practice",
)
def test_a_name_may_have_128_bytes(co: Co) -> None:
    """Size Limits: names of 128 bytes are accepted, also in characters of several bytes; longer ones are
    not.
    """
    long, short = co.name().ljust(128, "x"), co.name()
    wide = short + "x" * (len(short) % 2) + "ü" * ((128 - len(short)) // 2)
    volumes = [co.create(co.create_request(name=each)) for each in (long, wide)]
    assert len({each.volume_id for each in volumes}) == 2
    with co.beyond():
        _refused(co, co.create_request(name=long + "x"))


@case(108, CREATE)
@must(
    "CreateVolume",
    "any Unicode string without banned characters is allowed as a name, and a name is one volume",
)
def test_a_name_may_be_any_unicode(co: Co) -> None:
    """Size Limits: any name without control characters is accepted, and different names are different
    volumes.
    """
    suffix = co.name("")
    requests = [co.create_request(name=f"{each}{suffix}") for each in _ODD_NAMES]
    volumes = [co.create(each) for each in requests]
    assert len({each.volume_id for each in volumes}) == len(_ODD_NAMES)
    for request, volume in zip(requests, volumes, strict=True):
        assert co.create(request).volume_id == volume.volume_id


@case(109, CREATE)
@beyond("CreateVolume", "a CO sends no banned characters; that a plugin refuses them is practice")
def test_a_name_has_no_control_characters(co: Co) -> None:
    """Size Limits: U+0000-0008, 000B, 000C, 000E-001F and 007F-009F in a name are INVALID_ARGUMENT."""
    for odd in ("\0", "\x08", "\x0b", "\x0c", "\x0e", "\x1f", "\x7f", "\x85", "\x9f"):
        _refused(co, co.create_request(name=f"{co.name()}{odd}"))


@case(110, CREATE)
@beyond(
    "Size Limits", "a CO's maps have at most 4 KiB; that a plugin refuses larger ones is practice"
)
def test_a_map_has_at_most_4_kib(co: Co) -> None:
    """Size Limits: parameters of more than 4 KiB are INVALID_ARGUMENT."""
    request = co.create_request()
    for number in range(40):
        request.parameters[f"csi.storage.k8s.io/pvc/{number}"] = "x" * 120
    _refused(co, request)


@case(111, CREATE)
@must(
    "CreateVolume Errors",
    "a capacity_range that is not allowed MUST be OUT_OF_RANGE, out of capacity RESOURCE_EXHAUSTED; "
    "its values MUST NOT be negative",
)
def test_create_with_impossible_size_is_refused(co: Co) -> None:
    """CreateVolume: a limit below what is required or a negative size is refused; an exabyte, too, unless the
    driver's volumes have no size of their own; a refusal creates nothing.
    """
    contrary = co.create_request()
    contrary.capacity_range.limit_bytes = contrary.capacity_range.required_bytes - 1
    negative = co.create_request()
    negative.capacity_range.required_bytes = -1
    for request in (contrary, negative):
        _refused(co, request, Code.OUT_OF_RANGE, Code.INVALID_ARGUMENT)
    exabyte = co.create_request(size_bytes=1 << 60)
    code, message = co.outcome(co.controller.CreateVolume, exabyte)
    assert code in (Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"
    if code is Code.OK:
        return
    exabyte.capacity_range.required_bytes = co.options.parameters.size_bytes
    co.create(exabyte)


@case(115, CREATE, BLOCK)
@must(
    "CreateVolume Errors",
    "a volume of this name that is incompatible with volume_capabilities MUST be "
    "ALREADY_EXISTS, a compatible one OK",
)
def test_create_again_with_other_capability_is_refused_or_confirmed(co: Co) -> None:
    """CreateVolume: a name that exists with other capabilities is ALREADY_EXISTS, or the volume has them, as
    ValidateVolumeCapabilities confirms.
    """
    request = co.create_request(co.mount)
    volume = co.create(request)
    del request.volume_capabilities[:]
    request.volume_capabilities.append(block())
    code, _ = co.outcome(co.controller.CreateVolume, request)
    assert code in (Code.OK, Code.ALREADY_EXISTS), code
    if code is Code.OK:
        assert _is_confirmed(co, volume, block())


@case(116, CREATE)
@must(
    "CapacityRange",
    "the volume MUST be at least required_bytes and MUST NOT be bigger than limit_bytes",
)
def test_a_size_is_rounded_up_and_never_above_the_limit(co: Co) -> None:
    """CreateVolume: an odd number of bytes is rounded up; with a limit alone the volume is not larger; where
    no size lies between the two, OUT_OF_RANGE.
    """
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
    reply = co.reply(co.controller.CreateVolume, narrow)
    if isinstance(reply, Refusal):
        assert reply.code is Code.OUT_OF_RANGE, str(reply)
    else:
        assert reply.volume.capacity_bytes in (0, size + 1, size + 2)


@case(117, CREATE, NODE)
@must("Volume", "volume_context SHALL NOT be mutable")
def test_volume_context_is_constant(co: Co) -> None:
    """CreateVolume: volume_context is the same before and after the volume was used."""
    request = co.create_request()
    volume = co.create(request)
    co.release(volume, co.use(volume))
    assert co.create(request).volume_context == volume.volume_context


@case(125, CREATE)
@must(
    "CreateVolume",
    "if ANY of the capabilities is not supported, the call MUST return the appropriate code "
    "(Error Scheme: INVALID_ARGUMENT)",
)
def test_access_mode_is_refused_or_confirmed(co: Co) -> None:
    """CreateVolume: every access mode is INVALID_ARGUMENT, or the volume has it, as ValidateVolumeCapabilities
    confirms.
    """
    for mode in Mode.Mode.values():
        if mode == Mode.UNKNOWN:
            continue
        request = co.create_request(mount(co.mount.mount.fs_type, mode))
        reply = co.reply(co.controller.CreateVolume, request)
        if isinstance(reply, Refusal):
            assert reply.code is Code.INVALID_ARGUMENT, f"{Mode.Mode.Name(mode)}: {reply}"
        else:
            assert _is_confirmed(co, reply.volume, request.volume_capabilities[0])


def _refused(co: Co, request: csi_pb2.CreateVolumeRequest, *codes: Code) -> None:
    co.refused(co.controller.CreateVolume, request, *(codes or (Code.INVALID_ARGUMENT,)))


def _is_confirmed(co: Co, volume: csi_pb2.Volume, capability: csi_pb2.VolumeCapability) -> bool:
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id, volume_capabilities=[capability]
    )
    return co.ask(co.controller.ValidateVolumeCapabilities, request).HasField("confirmed")
