"""The looks at the open files of all processes, counted."""

import pytest

from crust.core import errors
from crust.host.block import openers, users


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One element for each look from now on, but for those that `users.check` repeats.

    It repeats a look at a device that another program of the machine has open for a moment.
    """
    looks: list[None] = []
    look, error = openers._openers, users.Users.error

    def one() -> openers.Openers:
        looks.append(None)
        return look()

    def repeated(found: users.Users, purpose: users.Purpose) -> errors.CrustError:
        looks.pop()
        return error(found, purpose)

    monkeypatch.setattr(openers, "_openers", one)
    monkeypatch.setattr(users.Users, "error", repeated)
    return looks
