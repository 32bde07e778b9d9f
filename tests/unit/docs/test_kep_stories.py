"""Each story of KEP-2857 has a test that names it: `grep -rn "mark.story" tests`."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_each_story_has_a_test() -> None:
    found = {
        argument.value
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in node.decorator_list
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.story"
        for argument in each.args
        if isinstance(argument, ast.Constant)
    }
    assert found == set(range(1, 7))
