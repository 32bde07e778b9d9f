"""The pages say how many cases there are, as the catalogue has them."""

import re
from pathlib import Path

import pytest

from crust_conformance import catalogue

ROOT = Path(__file__).parents[3]
SAID = {"C": r"(\d+) numbered\s+\[?cases", "R": r"(\d+)(?: cases)? for any runtime"}


def said(page: str, kind: str) -> list[int]:
    """What a page says; of the changes, those that are not released: what was released stays."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page == "CHANGELOG.md":
        text = text.partition("\n## Unreleased")[2].partition("\n## ")[0]
    return [int(number) for number in re.findall(SAID[kind], text)]


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/conformance.md"])
def test_number_of_cases_on_a_page_is_the_catalogues(page: str, kind: str) -> None:
    assert set(said(page, kind)) <= {len(catalogue.cases(kind))}


@pytest.mark.parametrize("kind", SAID)
def test_number_of_cases_is_found_on_a_page(kind: str) -> None:
    assert said("README.md", kind)
