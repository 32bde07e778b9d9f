"""An error that is expected by its name, as people see it."""

import pytest

from crust.core import errors


def raised(
    name: str, kind: type[errors.CrustError] = errors.CrustError, *, match: str | None = None
) -> "pytest.RaisesExc[errors.CrustError]":
    """As `pytest.raises`, for the error of crust with the name `name`, of the class or branch `kind`."""
    return pytest.raises(kind, match=match, check=lambda error: error.error_name == name)
