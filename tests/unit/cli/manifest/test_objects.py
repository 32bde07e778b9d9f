"""The names of the objects of a driver."""

import itertools

from crust.cli.manifest import objects
from crust.core.settings import loading


def test_no_two_names_have_one_stem() -> None:
    """All names of up to six characters of those that matter."""
    stems: dict[str, str] = {}
    for length in range(1, 7):
        for letters in itertools.product("a-.", repeat=length):
            name = "".join(letters)
            try:
                stem = objects.stem(name)
            except loading.InvalidSettings:
                continue
            assert stems.setdefault(stem, name) == name
    assert len(stems) > 50
