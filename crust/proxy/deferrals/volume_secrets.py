"""The secrets of published volumes, in memory and nowhere else, and who gets them.

A driver's answer brings them, and each publish that succeeds replaces them. A handler gets those of a volume that a
live sandbox of its own has claimed: the lock is held, and claim.json names the handler. They are dropped when the
volume is unpublished. A proxy that was started after the publish, also one that took over from another, has none: the
state that a successor reads is on the disk, and secrets are not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from crust import errors, operations, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store


class SecretsForgotten(errors.NotReady):
    """The proxy was started after the volume was published, and has no secrets of it."""

    def __init__(self, target: volumes.TargetPath) -> None:
        super().__init__(
            f"the secrets of the volume at {target} are not known any more",
            why="the proxy was started after the volume was published, and keeps secrets in memory only",
            hint="delete the pod and create it again; with requiresRepublish in the CSIDriver object and a "
            "node-publish secret the kubelet publishes again by itself",
        )


class SecretsNotForCaller(errors.NotReady):
    """A handler asks for the secrets of a volume that no live sandbox of its own has claimed."""

    def __init__(self, target: volumes.TargetPath, handler: str) -> None:
        super().__init__(
            f"runtime handler {handler[:63]!r} does not get the secrets of the volume at {target}",
            why="no live sandbox of that handler has claimed the volume",
            hint="claim the volume first, and ask while the claim is held (specs/handoff.md, H-49)",
        )


_LOOK_S = 10.0
"""For a look at one entry, which takes microseconds."""


class VolumeSecrets:
    """Secrets by target and volume. Used by the event loop alone."""

    def __init__(self, store: Store, running: operations.KeyedOperations) -> None:
        self._store = store
        self._running = running
        self._known: dict[str, tuple[volumes.VolumeKey, Mapping[str, str]]] = {}

    @contextmanager
    def kept(self, record: Record, secrets: Mapping[str, str]) -> Iterator[None]:
        """Keep a publish's secrets, while it is carried out and afterwards; those from before if it fails.

        A handler may claim as soon as there is an entry, so they are there first.
        """
        target = record.target.text
        before = self._known.get(target)
        self._set(target, (record.key, dict(secrets)) if secrets else None)
        try:
            yield
        except BaseException:
            self._set(target, before)
            raise

    def drop(self, target: volumes.TargetPath) -> None:
        """Forget them: the volume is not published any more."""
        self._known.pop(target.text, None)

    async def of(self, record: Record, handler: str) -> Mapping[str, str]:
        """The secrets that the guest needs; none for a volume that needs none.

        Raises `SecretsNotForCaller`, `SecretsForgotten`, and what reading the entry raises.
        """
        entry = await self._running.look(
            ("claim", record.target),
            lambda: self._store.read(record.target),
            timeout_s=_LOOK_S,
            shown=f"the entry of {record.target}",
            fresh=True,
        )
        claim = entry.claim if entry is not None else None
        if record.handler != handler or not _is_claim_of(claim, handler):
            raise SecretsNotForCaller(record.target, handler)
        if not record.mount.needs_secrets:
            return {}
        key, secrets = self._known.get(record.target.text, (None, {}))
        if key != record.key:
            raise SecretsForgotten(record.target)
        return secrets

    def _set(self, target: str, known: tuple[volumes.VolumeKey, Mapping[str, str]] | None) -> None:
        if known is None:
            self._known.pop(target, None)
        else:
            self._known[target] = known


def _is_claim_of(claim: claims.Claim | None, handler: str) -> bool:
    """A held lock alone may be the proxy's own, which is unpublishing: then no sandbox is named."""
    return claim is not None and claim.live and bool(claim.sandbox_id) and claim.handler == handler
