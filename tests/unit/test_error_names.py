"""The name of an error is shown to people, who look it up by it: there is one of each in the whole project."""

from collections import Counter

from tests.support.pages import error_table


def test_names_of_errors_are_unique_in_crust_and_examples() -> None:
    names = Counter(kind.__name__ for kind in error_table.all_errors())
    assert len(names) > 200
    duplicates = {name for name, count in names.items() if count > 1}
    places = [
        f"{kind.__module__}.{kind.__name__}"
        for kind in error_table.all_errors()
        if kind.__name__ in duplicates
    ]
    assert places == []
