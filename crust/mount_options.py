"""Mount options as a CO sends them, sorted by who may see which.

A CO's mount flags are words of mount(8). Some say how the *host* mounts (`_netdev`, `x-systemd…`, propagation), one
says what is a field of its own in CSI (`ro`), some move or replace mounts (`bind`, `remount`) and never belong to a
volume, and some filesystems take credentials in them: those must reach no file, so a volume that needs one is refused
where its options are read, by the option's name and never its value.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crust import errors

_READONLY = {"ro": True, "rw": False}
_HOST_BUSINESS = frozenset({
    "defaults", "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "owner", "group", "loop",
    "private", "rprivate", "shared", "rshared", "slave", "rslave", "unbindable", "runbindable",
})  # fmt: skip
_NOT_A_VOLUMES = frozenset({"bind", "rbind", "remount", "move"})
_LABELS = frozenset({"context", "fscontext", "defcontext", "rootcontext", "seclabel"})
_CREDENTIAL = re.compile(r"pass|secret|token|cred|key")
_LOGIN_IN_URL = re.compile(r"://[^/]*:[^/]*@")
_WORD = re.compile(r'(?:[^,"]|"[^"]*")+')


class CredentialInOptions(errors.InvalidRequest):
    """A mount option holds a credential; its value is not kept anywhere, this error included."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the mount option {name[:64]!r} is not accepted",
            why="it looks like a credential, which would lie on disk where the runtime reads it",
            hint="publish this volume without deferral, or hand the credential over by a CSI secret",
        )
        self.name = name


class MountOptionNotAllowed(errors.InvalidRequest):
    """A mount option that changes other mounts than the volume's own."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the mount option {name[:64]!r} is not accepted",
            why="it does not describe how a volume's filesystem is mounted",
            hint="remove it from the volume's mount options",
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Options of one filesystem mount, without "ro" and "rw", which `readonly` stands for."""

    options: tuple[str, ...]
    readonly: bool


def for_guest(flags: Iterable[str]) -> MountOptions:
    """What a guest kernel is told: nothing of the host's business, no security label of the host.

    Raises `CredentialInOptions` and `MountOptionNotAllowed`.
    """
    options = for_host(flags)
    words = tuple(word for word in options.options if _name(word) not in _LABELS)
    return MountOptions(words, options.readonly)


def for_host(flags: Iterable[str]) -> MountOptions:
    """What the host's kernel is told. Raises `CredentialInOptions` and `MountOptionNotAllowed`."""
    words: dict[str, None] = {}
    readonly = False
    for word in _words(flags):
        name = _name(word)
        _check(word, name)
        if word in _READONLY:
            readonly = _READONLY[word]
        elif name not in _HOST_BUSINESS and not name.startswith("x-"):
            words[word] = None
    return MountOptions(tuple(words), readonly)


def check_no_credential(words: Iterable[str]) -> None:
    """Raise `CredentialInOptions` if one of `words` looks like a credential."""
    for word in _words(words):
        if _CREDENTIAL.search(_name(word).lower()) or _LOGIN_IN_URL.search(word):
            raise CredentialInOptions(_name(word))


def _words(flags: Iterable[str]) -> Iterator[str]:
    for flag in flags:  # one flag may hold several words; a quoted SELinux label holds commas
        yield from (word.strip() for word in _WORD.findall(flag) if word.strip())


def _name(word: str) -> str:
    return word.partition("=")[0]


def _check(word: str, name: str) -> None:
    check_no_credential([word])
    if name in _NOT_A_VOLUMES or "\0" in word or "\n" in word:
        raise MountOptionNotAllowed(name)
