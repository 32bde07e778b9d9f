"""The checks: each looks at one fact, and reports it. A publish is forgotten if all are proven."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crust.cli.gc import forgotten
from crust.cli.gc.forgotten import ForgottenPublish
from crust.cli.gc.kernel import Kernel
from crust.core import volumes
from crust.host import answers
from crust.inspection import views


@dataclass(frozen=True, slots=True)
class ProofCheck:
    """One fact. `text`: the observation, or why it proves nothing."""

    name: str
    proven: bool
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The proxy's answer, with the sockets of its drivers by name, and the age that a publish must have."""

    sockets: Mapping[str, str]
    entries: tuple[views.VolumeRow, ...]
    grace_s: float


def checks(publish: ForgottenPublish, evidence: Evidence, kernel: Kernel) -> tuple[ProofCheck, ...]:
    """All checks of a publish. Blocks."""
    identity, is_served = f"{publish.data or 'the entry'} does not name the volume", False
    if publish.volume_id:
        is_served = publish.driver in evidence.sockets
        identity = f"volume {publish.volume_id} of {publish.driver}, which the proxy serves"
        if not is_served:
            identity = f"the proxy serves no driver {publish.driver}"
    hidden = kernel.not_visible()
    visible = "all processes and mounts of the host can be seen from here"
    unseen = f"hidden from here: {hidden}; run crust gc on the node itself: docs/operations.md says how beside pods"
    is_gone = answers.seen(publish.pod()) is None
    state = "does not exist" if is_gone else "exists: the kubelet knows the pod"
    names = kernel.processes_of(publish.pod_uid)
    found = f"still running: {', '.join(names[:5])}" if names else "no process is in a group of it"
    claimed = _why_claimed(publish, evidence)
    devices = tuple(_device(publish, evidence, kernel))
    # after all other looks: a publish since then is young
    if publish.mapped:
        parents = (os.path.dirname(publish.target), os.path.dirname(publish.mapped))
        age_s = min(map(_age_s, parents))
    else:
        published = next((e for e in evidence.entries if e.target_path == publish.target), None)
        since = published.published_at if published else None
        age_s = time.time() - since.timestamp() if since else 0.0
    age = f"unchanged for {age_s:.0f} s, the grace period is {evidence.grace_s:.0f} s"
    return (
        ProofCheck("identity", is_served, identity),
        ProofCheck("visibility", not hidden, unseen if hidden else visible),
        ProofCheck("pod-directory", is_gone, f"{publish.pod_directory} {state}"),
        ProofCheck("pod-processes", not names, f"pod {publish.pod_uid}: {found}"),
        ProofCheck("claim", not claimed, claimed or "no sandbox has claimed it"),
        *devices,
        ProofCheck("age", age_s >= evidence.grace_s, age),
    )


def why_staged(publish: ForgottenPublish, grace_s: float) -> str:
    """Why a raw volume must stay staged when the publish ends; empty if it need not, or is not staged. Blocks.

    Another pod may have a publish of any age: after a reboot no device is bound for the forgotten publish, and the
    only trace of the new pod is its own publish. A kubelet writes vol_data.json at each attempt.
    """
    if not publish.staging:
        return ""
    if pods := forgotten.other_pods(publish):
        return f"it is published for pod {', '.join(pods[:5])}"
    return "a kubelet works with it" if _age_s(publish.data) < grace_s else ""


def _why_claimed(publish: ForgottenPublish, evidence: Evidence) -> str:
    """Why a sandbox has the volume, or may have it; empty if none has."""
    unreadable = [entry.entry for entry in evidence.entries if entry.state == "unreadable"]
    if unreadable:
        return f"the entry {unreadable[0]} cannot be read: it may be of this volume"
    for entry in evidence.entries:
        if (entry.driver, entry.volume_id) != (publish.driver, publish.volume_id):
            continue
        if entry.sandbox_id or entry.state in ("claimed", "mounted"):
            return f"sandbox {entry.sandbox_id or '?'} has claimed it at {entry.target_path}"
        if entry.target_path != publish.target:
            return f"it is deferred at {entry.target_path}"
    return ""


def _device(publish: ForgottenPublish, evidence: Evidence, kernel: Kernel) -> Iterator[ProofCheck]:
    if publish.mapped:
        devices = [kernel.device_at(path) for path in (publish.target, publish.mapped)]
    else:
        rows = (entry for entry in evidence.entries if entry.target_path == publish.target)
        devices = [entry.device for entry in rows]
    bound = tuple(dict.fromkeys(filter(None, devices)))
    if len(bound) > 1:
        text = f"{publish.target} and {publish.mapped} are bound to different devices: {' and '.join(bound)}"
        yield ProofCheck("device", proven=False, text=text)
        return
    device = next(iter(bound), "")
    if not device:
        text = "no device is bound there any more; the driver looks before it detaches its own"
        yield ProofCheck("device", proven=True, text=text)
        return
    loops = kernel.loops_of(publish.mapped) if publish.mapped else ()
    users = kernel.users_of(device)
    texts = [*users.others, *(f"{loop} is upon it" for loop in users.loops if loop not in loops)]
    for loop in loops:
        upon = kernel.users_of(loop)
        texts += [f"{loop}: {text}" for text in (*upon.others, *upon.loops)]
    unused = f"{', '.join((device, *loops))}: not open, not mounted, and no device is built upon it"
    text = f"{device} is in use: {'; '.join(texts)}" if texts else unused
    yield ProofCheck("device", not texts, text)
    elsewhere = [path for path in users.binds if not _is_own(publish, path)]
    text = f"{device} is also bound at {', '.join(elsewhere)}" if elsewhere else "bound there only"
    yield ProofCheck("binds", not elsewhere, text)


def _is_own(publish: ForgottenPublish, path: str) -> bool:
    """Whether the bind belongs to the publish, to its stage, or to a shim for it."""
    staged = bool(publish.staging) and path.startswith(f"{publish.staging}/")
    private = volumes.is_private(path)
    return path in (publish.target, publish.mapped, publish.staging) or staged or private


def _age_s(path: str) -> float:
    """Seconds since the last change; infinite for a path that does not exist. Raises `OSError`."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return float("inf")
