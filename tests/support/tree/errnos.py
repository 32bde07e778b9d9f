"""Whether a handler of OSError answers by a named errno alone: rule A1 of `missing_answers`.

A handler may end without raising only on a path that has compared `errno` with named numbers: `errno.EBUSY`, a tuple
of such numbers, a constant (`_GONE`), or a variable to which the module assigns nothing else; or on a path that has
asked the `asyncio.timeout` whose `TimeoutError` it is: `limit.expired()`. All other paths raise.
The search follows `if`, `match`, `try`, `with` and loops.
"""

import ast
from collections.abc import Collection, Iterable, Sequence

_EXACT = frozenset(
    {
        "FileNotFoundError",
        "ProcessLookupError",
        "NotADirectoryError",
        "IsADirectoryError",
        "FileExistsError",
        "ChildProcessError",
        "ConnectionRefusedError",
    }
)
"""The classes of Python that stand for one errno: to catch one is to name its errno."""


def names_errno_or_raises(handler: ast.ExceptHandler, variables: Collection[str]) -> bool:
    """Whether each way out of the handler raises, or has a named errno before it; `variables` are named numbers."""
    paths = _Paths(variables)
    paths.follow(handler.body, is_named=False)
    return not paths.escapes


class _Paths:
    """The ways through a handler. A way `is_named` after a comparison with named errnos."""

    def __init__(self, variables: Collection[str]) -> None:
        self._variables = variables
        self._escapes = False
        self._ends: set[bool] = set()

    @property
    def escapes(self) -> bool:
        """Whether a way out is neither an exception nor after a named errno."""
        return self._escapes or False in self._ends

    def follow(self, body: Sequence[ast.stmt], *, is_named: bool) -> None:
        """Follow the statements of a handler to its end."""
        self._ends = self._after(body, {is_named})

    def _after(self, body: Sequence[ast.stmt], ways: set[bool]) -> set[bool]:
        for statement in body:
            ways = {end for way in ways for end in self._one(statement, way)}
        return ways

    def _one(self, node: ast.stmt, way: bool) -> set[bool]:  # noqa: FBT001
        match node:
            case ast.Raise():
                return set()
            case ast.Return() | ast.Continue() | ast.Break():
                self._escapes = self._escapes or not way
                return set()
            case ast.If():
                then = self._after(node.body, {way or self._names(node.test, outcome=True)})
                return then | self._after(
                    node.orelse, {way or self._names(node.test, outcome=False)}
                )
            case ast.Match():
                return self._cases(node, way)
            case (
                ast.Try()
                | ast.TryStar()
                | ast.With()
                | ast.AsyncWith()
                | ast.For()
                | ast.AsyncFor()
                | ast.While()
            ):
                return self._nested(node, way)
        return {way}

    def _cases(self, node: ast.Match, way: bool) -> set[bool]:  # noqa: FBT001
        ends = set() if any(map(_is_catch_all, node.cases)) else {way}
        for case in node.cases:
            is_value = isinstance(case.pattern, ast.MatchValue | ast.MatchOr)
            named = way or (is_value and _is_errno(node.subject))
            ends |= self._after(case.body, {named})
        return ends

    def _nested(self, node: ast.stmt, way: bool) -> set[bool]:  # noqa: FBT001
        ends = self._after(getattr(node, "body", []), {way})
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            ends.add(way)  # no round at all
        ends = self._after(getattr(node, "orelse", []), ends)
        for handler in getattr(node, "handlers", []):
            ends |= self._after(handler.body, {way})
        return self._after(getattr(node, "finalbody", []), ends)

    def _names(self, test: ast.expr, *, outcome: bool) -> bool:
        """Whether the errno is one of named numbers if `test` has this outcome."""
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return self._names(test.operand, outcome=not outcome)
            case ast.BoolOp():
                each = [self._names(value, outcome=outcome) for value in test.values]
                return any(each) if isinstance(test.op, ast.And) is outcome else all(each)
            case ast.Compare(left=left, ops=[operator], comparators=[numbers]) if _is_errno(left):
                wanted = (ast.Eq, ast.In) if outcome else (ast.NotEq, ast.NotIn)
                return isinstance(operator, wanted) and are_named(numbers, self._variables)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, classes]):
                return outcome and set(_last_names(classes)) <= _EXACT
            case ast.Call(func=ast.Attribute(attr="expired"), args=[], keywords=[]):
                return outcome
        return False


def _is_catch_all(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and not case.guard


def _is_errno(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "errno"


def named_variables(tree: ast.Module) -> frozenset[str]:
    """The variables of a module that are assigned named numbers alone, and are no parameter."""
    variables: set[str] = set()
    others = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                (variables if are_named(value) else others).add(name)
            case ast.Name(id=name, ctx=ast.Store()) if name not in variables:
                others.add(name)
    return frozenset(variables - others)


def are_named(node: ast.expr, variables: Collection[str] = ()) -> bool:
    """Whether an expression is of named numbers alone."""
    match node:
        case ast.Name(id=name) if name in variables:
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return are_named(body, variables) and are_named(orelse, variables)
        case ast.Attribute(value=ast.Name(id="errno")):
            return True
        case ast.Name() | ast.Attribute():
            return _last_name(node).lstrip("_").isupper()
        case ast.Starred():
            return are_named(node.value, variables)
        case ast.Tuple() | ast.List() | ast.Set():
            return all(are_named(each, variables) for each in node.elts)
    return False


def _last_names(node: ast.expr) -> Iterable[str]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return map(_last_name, parts)


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
