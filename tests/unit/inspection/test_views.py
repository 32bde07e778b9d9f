"""What is asked of a node, as rows."""

import pytest

from crust.inspection import views


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, ""), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1536 * 2**20, "1.5Gi"), (5 * 2**50, "5120Ti")],
)  # fmt: skip
def test_size_has_the_unit_that_fits(count: int, shown: str) -> None:
    assert views.size(count) == shown
