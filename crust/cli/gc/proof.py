"""The checks: each looks at one fact, and says what it saw. A publish is forgotten if all are proven."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crust.cli.gc import forgotten
from crust.cli.gc.forgotten import ForgottenPublish
from crust.cli.gc.kernel import Kernel
from crust.cli.inspecting import views


@dataclass(frozen=True, slots=True)
class Check:
    """One fact. `text`: what was seen, or why it does not prove anything."""

    name: str
    proven: bool
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the proxy answered, with the sockets of its drivers by name, and how long something must be old."""

    sockets: Mapping[str, str]
    entries: tuple[views.Volume, ...]
    grace_s: float


def checks(publish: ForgottenPublish, evidence: Evidence, kernel: Kernel) -> tuple[Check, ...]:
    """All of them. Blocks."""
    return (
        _identity(publish, evidence),
        _visibility(kernel),
        _pod_directory(publish),
        _pod_processes(publish, kernel),
        _claim(publish, evidence),
        *_device(publish, evidence, kernel),
        _age(publish, evidence),
    )


def why_staged(publish: ForgottenPublish, grace_s: float) -> str:
    """Why a raw volume must stay staged when the publish ends; empty if it need not, or is not staged. Blocks.

    Another pod may have it published for longer than any grace: no device is bound for that one any more after a
    reboot, and the only trace of the new pod is its own publish. A kubelet writes vol_data.json at each attempt.
    """
    if not publish.staging:
        return ""
    if others := forgotten.other_pods(publish):
        return f"it is published for pod {', '.join(others[:5])}"
    return "a kubelet works with it" if _age_s(publish.data) < grace_s else ""


def _identity(publish: ForgottenPublish, evidence: Evidence) -> Check:
    if not publish.volume_id:
        text = f"{publish.data or 'the entry'} does not say which volume it is"
        return Check("identity", proven=False, text=text)
    known = publish.driver in evidence.sockets
    text = f"volume {publish.volume_id} of {publish.driver}, which the proxy serves"
    other = f"the proxy serves no driver {publish.driver}"
    return Check("identity", known, text if known else other)


def _visibility(kernel: Kernel) -> Check:
    hidden = kernel.not_visible()
    seen = "all processes and mounts of the host can be seen from here"
    unseen = f"hidden from here: {hidden}; run crust gc on the node itself, in no container"
    return Check("visibility", not hidden, unseen if hidden else seen)


def _pod_directory(publish: ForgottenPublish) -> Check:
    is_gone = forgotten.is_absent(publish.pod_directory)
    state = "does not exist" if is_gone else "exists: the kubelet knows the pod"
    return Check("pod-directory", is_gone, f"{publish.pod_directory} {state}")


def _pod_processes(publish: ForgottenPublish, kernel: Kernel) -> Check:
    found = kernel.processes_of(publish.pod_uid)
    text = f"still running: {', '.join(found[:5])}" if found else "no process is in a group of it"
    return Check("pod-processes", not found, f"pod {publish.pod_uid}: {text}")


def _claim(publish: ForgottenPublish, evidence: Evidence) -> Check:
    unreadable = [entry.entry for entry in evidence.entries if entry.state == "unreadable"]
    if unreadable:
        text = f"the entry {unreadable[0]} cannot be read: it may be of this volume"
        return Check("claim", proven=False, text=text)
    for entry in evidence.entries:
        if (entry.driver, entry.volume_id) != (publish.driver, publish.volume_id):
            continue
        if entry.sandbox_id or entry.state in ("claimed", "mounted"):
            text = f"sandbox {entry.sandbox_id or '?'} has claimed it at {entry.target_path}"
            return Check("claim", proven=False, text=text)
        if entry.target_path != publish.target:
            text = f"it is deferred at {entry.target_path}"
            return Check("claim", proven=False, text=text)
    return Check("claim", proven=True, text="no sandbox has claimed it")


def _device(publish: ForgottenPublish, evidence: Evidence, kernel: Kernel) -> Iterator[Check]:
    bound = _devices_of(publish, evidence, kernel)
    if len(bound) > 1:
        text = f"{publish.target} and {publish.mapped} are bound to different devices: {' and '.join(bound)}"
        yield Check("device", proven=False, text=text)
        return
    device = next(iter(bound), "")
    if not device:
        text = "no device is bound there any more; the driver looks before it detaches its own"
        yield Check("device", proven=True, text=text)
        return
    own = kernel.loops_of(publish.mapped) if publish.mapped else ()
    users = kernel.users_of(device)
    others = [*users.others, *(f"{loop} is upon it" for loop in users.loops if loop not in own)]
    for each in own:
        upon = kernel.users_of(each)
        others += [f"{each}: {text}" for text in (*upon.others, *upon.loops)]
    nobody = f"nobody has {', '.join((device, *own))} open, mounted or built upon"
    text = f"{device} is in use: {'; '.join(others)}" if others else nobody
    yield Check("device", not others, text)
    elsewhere = [each for each in kernel.bound_at(device) if not _is_own(publish, each)]
    text = f"{device} is also bound at {', '.join(elsewhere)}" if elsewhere else "bound there only"
    yield Check("binds", not elsewhere, text)


def _is_own(publish: ForgottenPublish, path: str) -> bool:
    """Whether the publish, or its stage, has the bind there, or a shim for it."""
    staged = bool(publish.staging) and path.startswith(f"{publish.staging}/")
    private = bool(forgotten.SHIMS.search(path))
    return path in (publish.target, publish.mapped, publish.staging) or staged or private


def _devices_of(publish: ForgottenPublish, evidence: Evidence, kernel: Kernel) -> tuple[str, ...]:
    if publish.mapped:
        found = [kernel.device_at(each) for each in (publish.target, publish.mapped)]
    else:
        found = [entry.device for entry in evidence.entries if entry.target_path == publish.target]
    return tuple(dict.fromkeys(filter(None, found)))


def _age(publish: ForgottenPublish, evidence: Evidence) -> Check:
    if publish.mapped:
        parents = (os.path.dirname(publish.target), os.path.dirname(publish.mapped))
        age_s = min(map(_age_s, parents))
    else:
        found = next((e for e in evidence.entries if e.target_path == publish.target), None)
        since = found.published_at if found else None
        age_s = time.time() - since.timestamp() if since else 0.0
    is_old = age_s >= evidence.grace_s
    text = f"unchanged for {age_s:.0f} s, the grace period is {evidence.grace_s:.0f} s"
    return Check("age", is_old, text)


def _age_s(path: str) -> float:
    """Since the last change; what does not exist has not changed."""
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return float("inf")
    except OSError:
        return 0.0
