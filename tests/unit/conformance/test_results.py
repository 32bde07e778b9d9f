"""What a report says about a failed assertion."""

import pytest

from crust_conformance.results import explained


class _Host:
    """As the suite's view of the host."""

    def can_write(self) -> bool:
        return True


def test_comparison_without_a_sentence_begins_with_the_expression() -> None:
    host = _Host()
    with pytest.raises(AssertionError) as caught:
        assert not host.can_write()
    lines = explained(caught.value).splitlines()
    assert lines[0] == "this must hold: not host.can_write()"
    assert not [line for line in lines if "object at" in line or "where can_write" in line]


def test_sentence_of_a_case_stands_alone() -> None:
    with pytest.raises(AssertionError) as caught:
        assert not _Host().can_write(), "a read-only volume was written"
    assert explained(caught.value) == "a read-only volume was written"


def test_expression_of_several_lines_is_one_line() -> None:
    several = {"one", "two"}
    with pytest.raises(AssertionError) as caught:
        assert several == {
            "one",
        }
    assert explained(caught.value).splitlines()[0] == 'this must hold: several == { "one", }'


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError("its own words\nassert 1 == 2"), "its own words"),
        (AssertionError("the answer is OK: "), "the answer is OK"),
        (FileNotFoundError(2, "No such file or directory", "/a"), "No such file or directory: /a"),
    ],
)
def test_finding_has_the_words_of_its_error(error: BaseException, words: str) -> None:
    assert explained(error) == words


def test_values_of_a_comparison_stand_below_its_expression() -> None:
    """As the suite's runner explains it."""
    with pytest.raises(AssertionError) as caught:
        raise AssertionError("assert found 1, must be 2\n +  where 1 = len({...})")
    assert explained(caught.value).splitlines()[1:] == ["found 1, must be 2"]
