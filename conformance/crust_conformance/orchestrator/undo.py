"""The undoing of a case: an interceptor sees each call of the case on its way to the driver.

For each answer OK the interceptor notes the request that undoes the call, even if the case expected a refusal. After
a code that is not final (CSI "Error Scheme") the work may have been done: the step is noted as well, and a creation,
whose id is unknown, is repeated. After a final refusal no object should exist: the undoing request is sent, and its
answer does not count, because a driver need not know a path that it has refused. A step that the case itself has
undone is undone once more: that is idempotent.

The newest step is undone first, so that a volume is unpublished, then unstaged, then deleted. An object that cannot
be removed is a finding that names it, and the next steps are undone nevertheless.
"""

import contextlib
import copy
import errno
import os
import threading
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.catalogue import Clause, Strength
from crust_conformance.orchestrator.calls import PENDING, Calls, Code, Refusal
from crust_conformance.orchestrator.host_view import HostView
from crust_conformance.results import Finding, explained

_UNDO = Clause(
    Strength.MUST,
    "NodeUnpublishVolume, NodeUnstageVolume, DeleteVolume",
    "this RPC MUST undo the work by the corresponding one; this operation MUST be idempotent",
)
_FORGOTTEN = Clause(
    Strength.SHOULD,
    "NodeUnpublishVolume Errors",
    "NOT_FOUND is allowed for a volume that does not exist; its objects on the host should be gone",
)
_DIRECTORY = Clause(
    Strength.BEYOND, "after the case", "no file of the driver is in the CO's directories"
)
_ANSWERED_S = 10.0
"""How long the callback of an ended call may take."""


class CaseCleanup(grpc.UnaryUnaryClientInterceptor):
    """The steps of one case, and the directory `root` of all its paths.

    Intercept the case's channel by it.
    """

    def __init__(self, host: HostView, root: Path) -> None:
        self._host = host
        self._root = root
        self._steps: dict[bytes, tuple[Message, bool]] = {}
        """Each undoing request, and whether it must be answered OK."""

        self._running = 0
        self._is_cleaning = False
        """A repeated creation that then gets no final answer is not repeated again, but named in a finding."""

        self._changed = threading.Condition(threading.RLock())

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Watch each call of the channel, also a call whose future the case waits for."""
        with self._changed:
            self._running += 1
        try:
            call = continuation(client_call_details, request)
        except BaseException:  # the run is interrupted
            self._ended(request, Code.CANCELLED, None)
            raise
        call.add_done_callback(
            lambda done: self._ended(
                request, done.code(), done.result() if done.code() is Code.OK else None
            )
        )
        return call

    def clean(self, calls: Calls) -> list[Finding]:
        """Undo all steps, newest first; returns a finding for each object that could not be removed.

        NOT_FOUND means that the object is gone: CSI allows it for a volume that does not exist. Raises `OSError`.
        """
        findings: list[Finding] = []
        clause = _UNDO
        with self._changed:
            self._changed.wait_for(lambda: not self._running, _ANSWERED_S)
            self._is_cleaning = True
        while self._steps:
            _, (request, must_succeed) = self._steps.popitem()
            try:
                if must_succeed:
                    calls.until_final(request)
                else:
                    calls.reply(request)
            except (AssertionError, grpc.RpcError) as error:
                if isinstance(error, Refusal) and error.code is Code.NOT_FOUND:
                    clause = _FORGOTTEN
                    continue
                why = f"not removed ({_named(request)}): {explained(error)}"
                findings.append(Finding(_UNDO, why, calls.last))
        for path in self._host.mounts_below(self._root):
            findings.append(Finding(clause, f"not removed: {path} was still mounted"))
            self._host.unmount(path)
        with contextlib.suppress(FileNotFoundError):
            _remove_directories(str(self._root))
        if self._host.has(self._root):
            findings.append(Finding(_DIRECTORY, f"not removed: {self._root} is not empty"))
        return findings

    def _ended(self, request: Message, code: grpc.StatusCode, answer: Message | None) -> None:
        with self._changed:
            undone_by = self._undone_by(request, answer)
            if _is_creation(request):
                self._steps.pop(_key(request), None)
                if code in PENDING and not self._is_cleaning:
                    undone_by = request
            if undone_by is not None:
                key, is_due = _key(undone_by), code in (Code.OK, *PENDING)
                _, was_due = self._steps.get(key, (undone_by, False))
                self._steps[key] = (undone_by, is_due or was_due)
            self._running -= 1
            self._changed.notify_all()

    def _undone_by(self, request: Any, answer: Any) -> Message | None:
        """The request that undoes `request`; None if no request does, or if the answer lacks the id."""
        match request.DESCRIPTOR.name:
            case "NodePublishVolumeRequest":
                return csi_pb2.NodeUnpublishVolumeRequest(
                    volume_id=request.volume_id, target_path=request.target_path
                )
            case "NodeStageVolumeRequest":
                return csi_pb2.NodeUnstageVolumeRequest(
                    volume_id=request.volume_id, staging_target_path=request.staging_target_path
                )
            case "ControllerPublishVolumeRequest":
                return csi_pb2.ControllerUnpublishVolumeRequest(
                    volume_id=request.volume_id, node_id=request.node_id
                )
            case "CreateVolumeRequest" if answer and answer.volume.volume_id:
                return csi_pb2.DeleteVolumeRequest(volume_id=answer.volume.volume_id)
            case "CreateSnapshotRequest" if answer and answer.snapshot.snapshot_id:
                return csi_pb2.DeleteSnapshotRequest(snapshot_id=answer.snapshot.snapshot_id)
            case "CreateVolumeGroupSnapshotRequest" if (
                answer and answer.group_snapshot.group_snapshot_id
            ):
                return group_deletion(answer.group_snapshot)
        return None


def group_deletion(group: csi_pb2.VolumeGroupSnapshot) -> csi_pb2.DeleteVolumeGroupSnapshotRequest:
    """A DeleteVolumeGroupSnapshot of all members."""
    return csi_pb2.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id,
        snapshot_ids=[member.snapshot_id for member in group.snapshots],
    )


def _is_creation(request: Message) -> bool:
    return request.DESCRIPTOR.name.startswith("Create")


def _key(request: Message) -> bytes:
    """A key of the request without its secrets."""
    plain = copy.deepcopy(request)
    if "secrets" in plain.DESCRIPTOR.fields_by_name:
        plain.ClearField("secrets")
    return plain.DESCRIPTOR.name.encode() + plain.SerializeToString(deterministic=True)


def _named(request: Message) -> str:
    names = (
        *("name", "volume_id", "snapshot_id", "group_snapshot_id", "node_id"),
        *("staging_target_path", "target_path"),
    )
    has = request.DESCRIPTOR.fields_by_name
    return ", ".join(f"{name} {getattr(request, name)}" for name in names if name in has)


def _remove_directories(root: str) -> None:
    """Remove only directories: a file below the targets belongs to the driver, or to a volume. Raises `OSError`."""
    with os.scandir(root) as entries:
        directories = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for directory in directories:
        _remove_directories(directory)
    try:
        os.rmdir(root)
    except OSError as err:
        if err.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
