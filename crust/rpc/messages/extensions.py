"""How a caller opts in to crust's additions to CSI: gRPC metadata.

Released COs and conformance suites never send this metadata, so crust never advertises to them a capability that the
CSI specification does not have (specs/deferral.md, specs/node-identity.md).
"""

from typing import Any, Protocol

KEY = "crust-extensions"
DEFERRAL = "deferral"
NODE_INFO = "node-info"
ERROR_INFO = "error-info"
VERSIONS = "versions"
SHIM_VERSION = "crust-shim-version"
"""The trailing metadata of a Probe: the version that the shim's process runs."""
NOT_READY = "crust-not-ready-bin"
"""The trailing metadata of a Probe that is answered `ready = false`, for a caller that wants errors' names: why."""
METADATA: tuple[tuple[str, str], ...] = ((KEY, DEFERRAL),)
"""The metadata of a caller that knows deferral."""
NODE_INFO_METADATA: tuple[tuple[str, str], ...] = ((KEY, NODE_INFO),)
"""The metadata of a caller that knows specs/node-identity.md."""


class Caller(Protocol):
    """A call that is served, by crust or by a driver's own server: `Call`, or a context of gRPC."""

    def invocation_metadata(self) -> Any:
        """The metadata that its caller sent."""
        ...


def deferral_requested(call: Caller) -> bool:
    """Whether the caller opted in; the value is a comma-separated list."""
    return _requested(call, DEFERRAL)


def node_info_requested(call: Caller) -> bool:
    """Whether the caller knows NodeGetID and ControllerGetNodeInfo (specs/node-identity.md)."""
    return _requested(call, NODE_INFO)


def error_info_requested(call: Caller) -> bool:
    """Whether the caller of a CSI call wants an error's name in the status details, which CSI keeps empty."""
    return _requested(call, ERROR_INFO)


def versions_requested(call: Caller) -> bool:
    """Whether the caller of a Probe wants to know the versions of the processes that it passes."""
    return _requested(call, VERSIONS)


def _requested(call: Caller, name: str) -> bool:
    metadata = call.invocation_metadata() or ()
    return any(key == KEY and name in _split(value) for key, value in metadata)


def _split(value: str | bytes) -> list[str]:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return [each.strip() for each in text.split(",")]
