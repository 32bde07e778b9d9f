"""A missing answer is never "no": the whole of crust/ keeps the rules of tests/support/tree/missing_answers.py.

No place breaks a rule. A boundary passes errors of all kinds on: its line here says where to.
"""

from collections import Counter
from textwrap import dedent

import pytest

from tests.support.tree import ROOT, missing_answers
from tests.support.tree.missing_answers import Place, Places

BOUNDARIES = {
    ("host/answers.py", "ask", 1): "makes the answer: every other errno is Unseen",
    ("host/process/workers.py", "Workers._work", 1): "the caller gets the error of its call",
    ("host/process/workers.py", "entered", 1): "the context manager gets the error of its block",
    ("host/files/durable.py", "remove_temporary_files", 1): "logged: no code reads such a file",
    ("host/mounts/mountinfo.py", "at", 1): "raised, unless a descriptor shows the mount",
    ("core/logs.py", "QueuedHandler.emit", 1): "a log call that cannot be shown is logged",
    (
        "core/logs.py",
        "QueuedHandler._write",
        2,
    ): "a log without a reader has no place for its error",
    ("core/supervised.py", "_repeated", 1): "reports the error as unhealthy, and repeats the work",
    ("rpc/serving/service.py", "Service.answer", 1): "the caller of the RPC gets a status",
    ("rpc/serving/service.py", "Service.stream", 1): "the caller of the RPC gets a status",
    ("handoff/watch.py", "Watch._follow_root", 1): "logged: scans go on, and each watches again",
    ("kubernetes_api/api.py", "Informer.follow", 1): "ends a watch in time: the list comes anew",
    ("kata/nri.py", "_Session._call", 1): "the container engine gets a failure",
    ("kata/statistics.py", "KataHandler.stats", 1): "the condition of old numbers names it",
    ("kata/nri.py", "_logged", 1): "logs the error of a look in the background",
    ("proxy/publish.py", "Publish._failed", 2): "an undo: the publish's own error is the answer",
    ("proxy/host_publish.py", "HostPublish._undo", 1): "an undo: not done is a row that stays",
    ("proxy/table.py", "Entries.observe", 1): "the observation is UNSEEN, with its problem",
    ("runtime_handler/keeper.py", "KeeperProcess._accept", 1): "it lives on: the client waits",
    ("runtime_handler/keeper.py", "KeeperProcess._answer", 1): "the client gets the error",
    ("runtime_handler/keeper.py", "KeeperProcess._fork_standby", 2): "forks again, answers nobody",
    ("runtime_handler/keeper.py", "KeeperProcess._serve", 1): "the client's connection ends",
    (
        "runtime_handler/keeper.py",
        "KeeperProcess._withdraw_each",
        1,
    ): "the client gets the error, and the claim stays",
    ("blockdriver/node/node_stage.py", "NodeStage.may_be_left", 1): "an undo: not seen is left",
    ("csi_shim/wrap/staging.py", "Staging.stage_as_block", 1): "an undo: not done is left",
    ("csi_shim/wrap/wrapped.py", "WrappedVolumes._undo", 1): "an undo: not done is left",
    (
        "blockdriver/ceph/connection.py",
        "Connection._blocklist.wait",
        1,
    ): "the caller gets the error",
    (
        "blockdriver/engines/files/directories.py",
        "_free",
        1,
    ): "a removed volume's rest is in the log, and stays unsettled",
    ("blockdriver/host/usage.py", "problem", 1): "the volume's health condition names the error",
    ("cli/doctor/examine.py", "findings", 1): "doctor shows the error as a finding",
    ("cli/gc/collect.py", "_result", 1): "the publish is kept, or refused, with the error",
    (
        "cli/trial.py",
        "Trial._claimed_and_ended",
        1,
    ): "the unpublish is refused then, with its error",
    ("cli/install.py", "_say", 1): "a line without a reader: the installation goes on",
    ("cli/decisions.py", "_how_to_ask", 1): "a hint: DRIVER and PV stand for what cannot be read",
    ("cli/bundle.py", "parts", 1): "the bundle says what is missing in it, and why",
    ("cli/bundle.py", "_files", 2): "the bundle says what is missing in it, and why",
}
"""The handlers (A1) that stay: module below crust/, function, number; and what becomes of the error."""

BOUNDARIES_OF_VALUES = {
    ("host/process/systemd.py", "_send", 1): "systemd acts on each message that it misses",
    ("proxy/host_publish.py", "HostPublish._is_free", 1): "an undo: not seen is not new, and stays",
    ("runtime_handler/keeper.py", "_leave_unit", 1): "a wish: it stays in the daemon's group",
    ("runtime_handler/keeper.py", "main", 1): "a wish: without it the keeper runs all the same",
    ("blockdriver/records/records.py", "IndexedRecords.look_again", 1): "the record is in doubt",
    ("proxy/look.py", "Reconciler._restore", 1): "reported as unhealthy; the next look mounts it",
    ("kata/statistics.py", "_usable", 1): "the guest's own number, as its agent tells it",
    ("proxy/runtime_api.py", "RuntimeApi._condition", 1): "nothing is said of the size then",
}
"""The same of A2."""


def _boundaries() -> Places:
    return {
        Place(f"crust/{path}", name, rule): number
        for rule, stay in (("A1", BOUNDARIES), ("A2", BOUNDARIES_OF_VALUES))
        for path, name, number in stay
    }


@pytest.fixture(scope="module")
def found() -> Places:
    return missing_answers.places()


def test_tree_has_no_place_but_boundaries(found: Places) -> None:
    unlisted = Counter(found) - Counter(_boundaries())
    assert not unlisted, "name the errnos that are an answer; every other one is `NotSeen`"


def test_boundaries_exist(found: Places) -> None:
    assert not Counter(_boundaries()) - Counter(found)


def test_owners_of_interfaces_are_used_or_to_come() -> None:
    to_come = {"crust/host/process/processes.py"}
    modules = {path for owners in missing_answers.OWNERS.values() for path in owners}
    assert {path for path in modules if not (ROOT / path).exists()} <= to_come


def _rules(text: str) -> list[str]:
    found = missing_answers.of_source(dedent(text))
    return sorted(place.rule for place in found for _ in range(found[place]))


def _handler(handler: str) -> str:
    return f"def f():\n    try:\n        look()\n{_indented(handler)}"


_IN_CASES = """
except OSError as err:
    match err.errno:
        case errno.EIO | errno.ENXIO:
            return 0
        case _:
            raise
"""


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in dedent(text).strip().splitlines())


@pytest.mark.parametrize(
    "handler",
    [
        "except OSError:\n    return False",
        "except OSError:\n    pass",
        "except Exception:\n    found = None",
        "except:\n    pass",
        "except TimeoutError:\n    return False",
        "except ConnectionResetError:\n    return False",
        "except TimeoutError:\n    if not limit.expired():\n        return False\n    raise",
        "except BlockingIOError:\n    return False",
        "except PermissionError:\n    return True",
        "except (FileNotFoundError, PermissionError):\n    return True",
        "except (ValueError, socket.timeout):\n    return True",
        "except OSError as err:\n    return err.errno == errno.EBUSY",
        "except OSError as err:\n    if err.errno == errno.EBUSY:\n        return True",
        "except OSError as err:\n    if is_gone(err):\n        return False\n    raise",
        "except OSError as err:\n    if err.errno != errno.EBUSY:\n        return False\n    raise",
        "except OSError as err:\n    if err.errno in numbers:\n        return False\n    raise",
        "except OSError as err:\n    if err.errno == errno.EIO or late():\n        return 0\n    raise",
        "except OSError as err:\n    if late():\n        raise\n    return 0",
        "except OSError as err:\n    for each in many:\n        raise each from err",
        "except OSError as err:\n    try:\n        raise Refused from err\n    except Gone:\n        pass",
        "except OSError as err:\n    match err.errno:\n        case _:\n            return None",
    ],
)
def test_handler_that_answers_for_any_errno_is_found(handler: str) -> None:
    assert _rules(_handler(handler)) == ["A1"]


@pytest.mark.parametrize(
    "handler",
    [
        "except FileNotFoundError:\n    return False",
        "except (FileNotFoundError, NotADirectoryError, ProcessLookupError):\n    return None",
        "except ValueError:\n    return None",
        "except ConnectionRefusedError:\n    return False",
        "except TimeoutError:\n    if not limit.expired():\n        raise\n    return False",
        "except OSError:\n    raise",
        "except OSError as err:\n    raise Refused from err",
        "except BaseException:\n    close()\n    raise",
        "except OSError as err:\n    if err.errno in (errno.ENOENT, errno.ESRCH):\n        return None\n    raise",
        "except OSError as err:\n    if err.errno not in _GONE:\n        raise\n    return None",
        "except OSError as err:\n    if err.errno not in (*_GONE, errno.EINVAL):\n        raise",
        "except OSError as err:\n    if err.errno == errno.EIO and late():\n        return 0\n    raise",
        "except OSError as err:\n    if not (err.errno == errno.EIO):\n        raise\n    return 0",
        "except OSError as err:\n    if isinstance(err, FileNotFoundError):\n        return 0\n    raise",
        "except OSError as err:\n    if late():\n        raise A from err\n    else:\n        raise B from err",
        _IN_CASES,
    ],
)
def test_handler_that_names_its_errnos_is_accepted(handler: str) -> None:
    assert _rules(_handler(handler)) == []


@pytest.mark.parametrize(
    ("before", "rules"),
    [
        ("ended = (*_ENDED, errno.EIO) if pid == '1' else _ENDED", []),
        ("ended = look()", ["A1"]),
        ("ended = _ENDED\nended = look()", ["A1"]),
        ("for ended in many:\n    pass", ["A1"]),
        ("def other(ended):\n    pass\nended = _ENDED", ["A1"]),
    ],
)
def test_variable_of_named_errnos_is_accepted(before: str, rules: list[str]) -> None:
    handler = "except OSError as err:\n    if err.errno not in ended:\n        raise\n    return 0"
    assert _rules(f"{before}\n{_handler(handler)}") == rules


def test_handler_of_a_named_tuple_of_classes_is_found() -> None:
    text = "_NO_FILE = (OSError, ValueError)\n" + _handler("except _NO_FILE:\n    return ''")
    assert _rules(text) == ["A1"]


@pytest.mark.parametrize(
    "text",
    [
        "with suppress(OSError):\n    look()",
        "with contextlib.suppress(errors.CrustError):\n    look()",
        "with suppress(ValueError, TimeoutError):\n    look()",
        "with suppress(answers.NotSeen):\n    look()",
        _handler("except errors.CrustError:\n    return False"),
        _handler("except errors.CrustError:\n    return None"),
        _handler("except CrustError as err:\n    return isinstance(err, errors.NotReady)"),
        _handler("except errors.PeerUnavailable:\n    return ()"),
        _handler("except answers.NotSeen:\n    found = 0"),
        _handler("except errors.CrustError:\n    identity, problem = None, ''"),
        _handler("except errors.CrustError:\n    if late():\n        return 1\n    raise"),
    ],
)
def test_value_out_of_an_error_is_found(text: str) -> None:
    assert _rules(text) == ["A2"]


@pytest.mark.parametrize(
    "text",
    [
        "with suppress(FileNotFoundError, ValueError):\n    look()",
        _handler("except errors.CrustError:\n    log()"),
        _handler("except errors.CrustError:\n    return"),
        _handler("except errors.CrustError as err:\n    return err"),
        _handler("except errors.CrustError as err:\n    identity, problem = None, err"),
        _handler("except errors.CrustError as err:\n    raise Refused from err"),
        _handler("except errors.NotFound:\n    return None"),
    ],
)
def test_error_without_a_value_is_accepted(text: str) -> None:
    assert _rules(text) == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{name}(path)"
            for name in sorted(missing_answers.PATH_TESTS | missing_answers.LISTINGS)
        ),
        "Path(path).exists()",
        "self.root.is_dir()",
        "(root / name).is_file()",
    ],
)
def test_path_test_is_found(text: str) -> None:
    assert _rules(text) == ["A3"]


@pytest.mark.parametrize(
    "text",
    [
        "os.stat(path)",
        "os.path.join(path, name)",
        "from crust.host.files import listing\nlisting.exists(path)",
        "with os.scandir(path) as entries:\n    names = [e.name for e in entries if e.is_dir()]",
    ],
)
def test_question_that_raises_is_accepted(text: str) -> None:
    assert _rules(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "os.pidfd_open(pid)",
        "os.listdir(f'/proc/{pid}/fd')",
        "os.listdir('/proc/1/fd')",
        "os.readlink(f'/proc/{pid}/ns/mnt')",
        "open(f'/proc/{pid}/fdinfo/{fd}')",
        "os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)",
    ],
)
def test_interface_of_a_question_elsewhere_is_found(text: str) -> None:
    assert _rules(text) == ["A4"]


@pytest.mark.parametrize(
    "text",
    [
        "os.readlink(f'/proc/self/fd/{fd}')",
        "os.listdir('/proc/self/fd')",
        "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)",
        "os.open(path, os.O_EXCL | os.O_WRONLY | os.O_CREAT)",
        "'the list of /proc/1/fd is empty'",
    ],
)
def test_own_descriptors_and_new_files_are_accepted(text: str) -> None:
    assert _rules(text) == []


def test_interface_is_accepted_in_its_owner_alone() -> None:
    text = "os.pidfd_open(pid)"
    assert not missing_answers.of_source(text, "crust/host/process/processes.py")
    assert missing_answers.of_source(text, "crust/host/block/users.py")


def test_place_is_a_function_with_a_count() -> None:
    text = """
    class Store:
        def read(self):
            def inner():
                os.path.exists(a)
            return os.path.exists(a) or os.path.exists(b)
    os.path.exists(c)
    """
    assert missing_answers.of_source(dedent(text), "crust/a.py") == {
        Place("crust/a.py", "Store.read.inner", "A3"): 1,
        Place("crust/a.py", "Store.read", "A3"): 2,
        Place("crust/a.py", "<module>", "A3"): 1,
    }
