"""The names of a driver's objects, so that two drivers can be installed in one cluster.

For `kubectl apply` an object of the same kind, namespace and name is the same object: the second driver's DaemonSet
would replace the first one's, with no word. So each name begins with a stem that follows from the driver's name, and
no two drivers have one stem. The files of deploy/kubernetes have the two stems of the drivers that they are for.
"""

import re
from typing import Any, TypeVar

from crust.cli.manifest.composition import Object
from crust.core.settings.driver import OWN_DRIVER
from crust.core.settings.loading import InvalidSettings

T = TypeVar("T")
EXAMPLE_SHARED = "rbd.csi.crust.dev"
"""The driver of the overlays for Ceph."""
_STEMS = {OWN_DRIVER: "crust", EXAMPLE_SHARED: "crust-rbd"}
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_OF_ALL = ("Namespace", "CSIDriver")
"""Their names are not made from a stem: one is the cluster's, the other the driver's own."""


def stem(driver: str) -> str:
    """The beginning of the names of a driver's objects. Raises `InvalidSettings`."""
    if not _SUBDOMAIN.fullmatch(driver):
        raise InvalidSettings(
            "driver manifest",
            f"a CSIDriver object cannot have the name {driver}: driver_name must be lower-case letters, digits and"
            " '-', in parts that '.' separates",
        )
    # '-' is doubled, and stands neither first nor last in a part: so no two names become one
    found = _STEMS.get(driver) or f"crust-{driver.replace('-', '--').replace('.', '-')}"
    if driver not in _STEMS and found in _STEMS.values():
        raise InvalidSettings(
            "driver manifest",
            f"the objects of driver_name {driver} would have the names of {EXAMPLE_SHARED}'s: give it a domain",
        )
    return found


def renamed(found: Object, example: str, driver: str, kept: tuple[str, ...]) -> Object:
    """An object that is written for the driver `example`, with the names of `driver`. What begins with one of `kept`
    is no such name.
    """
    before, after = _STEMS[example], stem(driver)
    if before == after or found["kind"] in _OF_ALL:
        return found
    changed: Object = _replaced(found, before, after, kept)
    if found["metadata"]["name"] == before:
        changed["metadata"]["name"] = after
    return changed


def replaced(texts: T, example: str, driver: str) -> T:
    """Names outside of an object: those of `driver` where the files have those of `example`."""
    changed: T = _replaced(texts, _STEMS[example], stem(driver), ())
    return changed


def _replaced(found: Any, before: str, after: str, kept: tuple[str, ...]) -> Any:
    if isinstance(found, dict):
        return {key: _replaced(each, before, after, kept) for key, each in found.items()}
    if isinstance(found, list):
        return [_replaced(each, before, after, kept) for each in found]
    if not isinstance(found, str) or found.startswith(kept) or not found.startswith(f"{before}-"):
        return found
    return after + found[len(before) :]
