"""The gRPC metadata by which a caller opts in to crust's additions to CSI.

Released COs and conformance suites never send this metadata, so crust never advertises to them a capability that the
CSI specification does not have (specs/deferral.md, specs/node-identity.md).
"""

from typing import Any

KEY = "crust-extensions"
DEFERRAL = "deferral"
NODE_INFO = "node-info"
"""NodeGetID and ControllerGetNodeInfo (specs/node-identity.md)."""
NOBODY_GROWS = "nobody-grows"
"""At a publish: neither the runtime handler nor this host grows the volume's filesystem."""
ERROR_INFO = "error-info"
"""An error's name in the status details of a CSI call, which CSI keeps empty."""
VERSIONS = "versions"
"""The versions of the processes that a Probe passes."""
SHIM_VERSION = "crust-shim-version"
"""The trailing metadata of a Probe: the version that the shim's process runs."""
PROXY_VERSION = "crust-proxy-version"
"""The same of the proxy's process."""
NOT_READY = "crust-not-ready-bin"
"""The trailing metadata with the reason of a Probe's `ready = false`, for a caller that wants errors' names."""
STAGE_AS = "crust-stage-as"
"""The metadata of a NodeStageVolume with the proxy's decision for a wrapped driver: `BLOCK` or `AS_ASKED`."""
GUEST_KERNEL = "crust-guest-kernel"
"""The metadata of a NodeStageVolume with the kernel of the only guests that the volume is for, if it is known."""
BLOCK = "block"
AS_ASKED = "as-asked"
METADATA: tuple[tuple[str, str], ...] = ((KEY, DEFERRAL),)
"""The metadata of a caller that knows deferral."""


def staged_as(
    metadata: Any, *, block: bool, guest_kernel: str
) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata of a NodeStageVolume, with this decision in place of any other."""
    others = (pair for pair in metadata if pair[0] not in (STAGE_AS, GUEST_KERNEL))
    kernel = ((GUEST_KERNEL, guest_kernel),) if guest_kernel else ()
    return (*others, (STAGE_AS, BLOCK if block else AS_ASKED), *kernel)


def guest_kernel(metadata: Any) -> str:
    """The kernel of the only guests that a staged volume is for; empty: not known."""
    return next((str(value) for key, value in metadata or () if key == GUEST_KERNEL), "")


def is_staged_as_block(metadata: Any) -> bool | None:
    """The decision of the proxy; None if no proxy has made one."""
    decided = [value for key, value in metadata or () if key == STAGE_AS]
    return {(BLOCK,): True, (AS_ASKED,): False}.get(tuple(decided))


def requested(metadata: Any, extension: str) -> bool:
    """Whether the caller opted in to an addition, by its metadata: the value is a comma-separated list."""
    raw = (value for key, value in metadata or () if key == KEY)
    texts = (text.decode("ascii", "replace") if isinstance(text, bytes) else text for text in raw)
    return any(extension in map(str.strip, text.split(",")) for text in texts)
