"""Failed comparisons in words."""

import ast

import pytest

from crust.wire.csi.v1 import csi_pb2
from crust_conformance import comparisons
from crust_conformance.runtimes import suite


@pytest.mark.parametrize(
    ("operator", "left", "right", "words"),
    [
        ("==", 1 << 40, 0, "found 1099511627776, must be 0"),
        ("<=", 5, 3.5, "found 5, must be at most 3.5"),
        ("in", "a", ["b", ""], 'found "a", must be among ["b", an empty text]'),
        ("is", None, True, "found nothing, must be true"),
        ("==", b"k" * 17, b"", f"found 17 bytes ({' '.join(['6b'] * 16)}…), must be 0 bytes ()"),
        ("==", {"a": object()}, (), 'found {"a": a object}, must be []'),
        ("==", csi_pb2.Topology(segments={"a": "b"}), 0, 'found Topology {"segments": {"a": "b"}}, must be 0'),
        ("==", {"a", "b"}, {"b", "c"}, 'found ["a"], which must not be there and not ["c"], which must be there'),
        ("<=", {"a"}, {"b"}, 'found ["a"], which must not be there'),
        (">=", {"b"}, {"a", "b"}, 'found not ["a"], which must be there'),
        ("!=", {"a"}, {"a"}, 'found ["a"], must not be ["a"]'),
    ],
)  # fmt: skip
def test_comparison_is_a_sentence(operator: str, left: object, right: object, words: str) -> None:
    assert comparisons.in_words(operator, left, right) == words


def test_long_value_is_cut_in_a_sentence() -> None:
    sentence = comparisons.in_words("==", "x" * 1000, "")
    assert sentence == f'found "{"x" * 199}…, must be an empty text'


def test_each_assertion_of_the_cases_for_runtimes_has_its_words() -> None:
    texts = [path.read_text(encoding="utf-8") for path in suite.CASES.glob("*_cases.py")]
    asserts = [
        node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)
    ]
    assert len(asserts) > 50
    wordless = [
        ast.unparse(node)
        for node in asserts
        if not isinstance(node.msg, ast.JoinedStr | ast.Constant)
    ]
    assert wordless == []
