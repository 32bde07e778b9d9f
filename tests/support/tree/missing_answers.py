"""The places of the shipped packages where a missing answer counts as an answer, found in the syntax.

    A1  a handler of OSError, of a wider class, or of a class that stands for several errnos, which neither always
        raises nor names the errnos that it answers for (`errnos`)
    A2  suppress() of these classes or of CrustError, and a handler of CrustError that gives a value; an error that is
        itself the value keeps its reason, and is no answer
    A3  a test of a path that is False for every errno: os.path.exists and the others, Path.exists and the others,
        os.access; and a listing that leaves out what it cannot read: glob, Path.glob, os.walk
    A4  an interface of the kernel by which a question is asked, in another module than the owner's

A place is a rule in a function: lines move with each edit, and two equal places of a function are a count. The rules
know the syntax alone: they follow no call, and a class by another name only if a module says `NAME = (OSError, …)`.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.tree import ROOT, sources
from tests.support.tree.errnos import named_variables, names_errno_or_raises

_SEVERAL_ERRNOS = frozenset(
    {
        "BaseException",
        "Exception",
        "OSError",
        "IOError",
        "EnvironmentError",
        "error",  # socket.error, select.error
        "timeout",  # socket.timeout
        "TimeoutError",
        "ConnectionError",
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionResetError",
        "BlockingIOError",
        "PermissionError",
        "InterruptedError",
    }
)
_ALL_REASONS = frozenset({"CrustError", "PeerUnavailable", "NotSeen"})
"""The classes of crust of which an error may be a missing answer."""

PATH_TESTS = frozenset(
    f"os.path.{name}"
    for name in ("exists", "lexists", "isdir", "isfile", "islink", "ismount", "isjunction")
)
LISTINGS = frozenset({"os.access", "os.walk", "glob.glob", "glob.iglob"})
_PATH_METHODS = frozenset(
    {"exists", "is_dir", "is_file", "is_symlink", "is_mount", "is_socket", "is_fifo"}
    | {"is_block_device", "is_char_device", "is_junction", "glob", "rglob"}
)

OWNERS: Mapping[str, Mapping[str, str]] = {
    "open files of a process": {
        "crust/host/block/openers.py": "who has a device open",
        "crust/host/mounts/mount_users.py": "the names of a busy mount's users",
        "crust/host/process/open_files.py": "who holds a file's lock",
        "crust/host/mounts/mountinfo.py": "the mount of an own descriptor",
    },
    "mount namespace of a process": {
        "crust/host/mounts/mountinfo.py": "what is mounted, in each namespace",
        "crust/host/mounts/propagation.py": "whether this process has the host's mounts",
    },
    "pidfd_open": {
        "crust/host/process/processes.py": "whether a process is still the same",
        "crust/host/process/commands.py": "the end of an own child",
        "crust/host/process/open_files.py": "the descriptors of a process that may end meanwhile",
        "crust/runtime_handler/keeper.py": "the end of keeper and standby, each the other's",
    },
    "O_EXCL without O_CREAT": {
        "crust/host/block/users.py": "who uses a device",
        "crust/host/block/devices.py": "takes the exclusive hold, which is no question",
        "crust/host/block/loop.py": "takes the exclusive hold before it detaches",
    },
}
"""For each interface of the kernel (A4) the modules that may use it, and for what."""


_PROCESS_FILE = re.compile(r"""^f?["']/proc/(?!self/)""")
_OPEN_FILES = re.compile(r"/fd(info)?\b")


class Place(NamedTuple):
    """A rule that a function breaks."""

    path: str
    function: str
    """Its qualified name; "<module>" outside of functions."""
    rule: str


Places = Mapping[Place, int]
"""How often each function breaks each rule."""


def places(root: Path = ROOT) -> Places:
    """All places of the shipped packages of a checkout."""
    trees = {path: ast.parse(file.read_text()) for path, file in sources(root)}
    classes = _named_classes(trees.values())
    return Counter(
        place for path, tree in trees.items() for place in _of_module(path, tree, classes)
    )


def of_source(source: str, path: str = "crust/part.py") -> Places:
    """The places in the text of one module."""
    tree = ast.parse(source)
    return Counter(_of_module(path, tree, _named_classes([tree])))


def _named_classes(trees: Iterable[ast.Module]) -> Mapping[str, frozenset[str]]:
    """The constants that are a class or a tuple of classes: what `except NAME` catches."""
    found: dict[str, frozenset[str]] = {}
    for statement in (statement for tree in trees for statement in tree.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.lstrip("_").isupper():
                found[name] = found.get(name, frozenset()) | _class_names(value)
    return found


def _class_names(node: ast.expr) -> frozenset[str]:
    match node:
        case ast.Tuple() | ast.List():
            return frozenset().union(*map(_class_names, node.elts))
        case ast.Starred():
            return _class_names(node.value)
        case ast.BinOp(left=left, right=right):
            return _class_names(left) | _class_names(right)
    return frozenset({ast.unparse(node).rpartition(".")[2]})


def _of_module(
    path: str, tree: ast.Module, classes: Mapping[str, frozenset[str]]
) -> Iterator[Place]:
    no_paths = _imported(tree) | _scanned(tree)
    module = _Module(path, classes, no_paths, named_variables(tree))
    for function, node in _with_functions(tree, ()):
        for rule in module.broken(node):
            yield Place(path, function, rule)


def _with_functions(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """Each node with the function that it is in; of flags that are joined (`a | b | c`) the whole alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.BinOp) and isinstance(child, ast.BinOp)):
            yield ".".join(within) or "<module>", child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _with_functions(child, (*within, child.name))
        else:
            yield from _with_functions(child, within)


def _imported(tree: ast.Module) -> frozenset[str]:
    """The names of imports: `files.exists` is a function of a module, and no test of a path."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(
        alias.asname or alias.name.partition(".")[0] for each in imports for alias in each.names
    )


def _scanned(tree: ast.Module) -> frozenset[str]:
    """The names of entries of os.scandir, whose tests raise all but ENOENT."""
    items = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    lists = {
        ast.unparse(item.optional_vars)
        for item in items
        if item.optional_vars is not None and "scandir(" in ast.unparse(item.context_expr)
    }
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    return frozenset(ast.unparse(loop.target) for loop in loops if ast.unparse(loop.iter) in lists)


@dataclass(frozen=True, slots=True)
class _Module:
    """The rules for the nodes of one module."""

    path: str
    classes: Mapping[str, frozenset[str]]
    no_paths: frozenset[str]
    """The names that are no paths, and may have methods named like a test of a path."""
    errnos: frozenset[str]
    """The variables that are named errnos."""

    def broken(self, node: ast.AST) -> Iterator[str]:
        """The rules that a node breaks."""
        match node:
            case ast.ExceptHandler():
                yield from self._handler(node)
            case ast.Call():
                yield from self._call(node)
            case _ if any(self.path not in OWNERS[name] for name in _interfaces(node)):
                yield "A4"

    def _handler(self, node: ast.ExceptHandler) -> Iterator[str]:
        caught = self._classes_of([node.type]) if node.type is not None else {"BaseException"}
        if caught & _SEVERAL_ERRNOS and not names_errno_or_raises(node, self.errnos):
            yield "A1"
        elif caught & _ALL_REASONS and any(_gives_value(each, node.name) for each in _own(node)):
            yield "A2"

    def _call(self, node: ast.Call) -> Iterator[str]:
        name = ast.unparse(node.func)
        if name.rpartition(".")[2] == "suppress":
            if self._classes_of(node.args) & (_SEVERAL_ERRNOS | _ALL_REASONS):
                yield "A2"
        elif name in PATH_TESTS | LISTINGS or self._is_path_method(node.func):
            yield "A3"

    def _is_path_method(self, node: ast.expr) -> bool:
        is_method = isinstance(node, ast.Attribute) and node.attr in _PATH_METHODS
        return is_method and ast.unparse(node).rpartition(".")[0] not in self.no_paths

    def _classes_of(self, nodes: Iterable[ast.expr]) -> frozenset[str]:
        names = frozenset().union(*map(_class_names, nodes))
        return frozenset().union(*(self.classes.get(name, {name}) for name in names))


def _own(handler: ast.ExceptHandler) -> Iterator[ast.AST]:
    """The nodes of a handler, without those of functions in it."""
    todo: list[ast.AST] = list(handler.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def _gives_value(node: ast.AST, error: str | None) -> bool:
    """Whether a statement gives a value for the error, and the error is no part of the value."""
    match node:
        case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
            return not _contains(value, error)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _is_empty(value)
    return False


def _contains(value: ast.expr, error: str | None) -> bool:
    """Whether the error itself is in the value, and not only its class."""
    tested = {
        name
        for call in ast.walk(value)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance"
        for name in ast.walk(call)
    }
    names = {node for node in ast.walk(value) if isinstance(node, ast.Name)} - tested
    return any(node.id == error for node in names)


def _is_empty(value: ast.expr) -> bool:
    """Whether it is None, a boolean, or an empty text, number or collection."""
    match value:
        case ast.Constant(value=constant):
            return isinstance(constant, bool) or not constant
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return all(map(_is_empty, elements))
        case ast.Dict(keys=keys):
            return not keys
    return False


def _interfaces(node: ast.AST) -> Iterator[str]:
    """The interfaces of the kernel that a node names. A process may look at itself."""
    match node:
        case ast.Attribute(attr="pidfd_open"):
            yield "pidfd_open"
        case ast.BinOp(op=ast.BitOr()) if "O_EXCL" in _flags(node) and "O_CREAT" not in _flags(
            node
        ):
            yield "O_EXCL without O_CREAT"
        case ast.JoinedStr() | ast.Constant(value=str()):
            yield from _procfs(ast.unparse(node))


def _flags(node: ast.BinOp) -> list[str]:
    return [part.strip().rpartition(".")[2] for part in ast.unparse(node).split("|")]


def _procfs(text: str) -> Iterator[str]:
    if not _PROCESS_FILE.search(text):
        return
    if _OPEN_FILES.search(text):
        yield "open files of a process"
    if "/ns/mnt" in text:
        yield "mount namespace of a process"
