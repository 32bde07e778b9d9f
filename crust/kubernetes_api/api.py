"""The client of the Kubernetes API, and the one place where its failures become errors of crust.

lightkube, an optional package, reads the kubeconfig and authenticates the client: only `client` imports it, so that a
program that asks no API server runs without it. This module parses the server's answers, because lightkube's models
refuse the output of Go's types (`objects`). Each answer is bounded in size and in time before it is parsed.

`Informer` keeps the objects of one kind known by list and watch. If a watch loses events or its connection without an
error, the next list repairs it. The caller chooses which part of an object is kept; that part is as old as the watch
is late.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import pydantic

from crust.core import errors
from crust.core.pauses import scattered
from crust.core.settings.loading import InvalidSettings
from crust.core.supervised import Health, supervised
from crust.kubernetes_api.objects import KubernetesObject, ListBody, Status, WatchEvent

if TYPE_CHECKING:
    import httpx2

_log = logging.getLogger(__name__)

_ASK_S = 10.0
"""The time for one question. A kubelet waits two minutes for its publish, and repeats it."""
_PAGE = 500
"""Objects of one answer of a list."""
_ANSWER_BYTES = 64 << 20
_EVENT_BYTES = 8 << 20
"""An object in etcd has at most 1.5 MiB."""
_OK, _NOT_FOUND, _GONE = 200, 404, 410
_RELIST_S = 600.0
_WAIT_S = 5.0
"""external-attacher gives a detach 15 s."""
_PAUSES_S = (2.0, 5.0, 10.0, 30.0)
"""The pause before the next list, by the number of watches that have ended since the last change. The first one is a
pause too: a server that restarts ends the watches of all nodes at one moment."""
_PLUGINS = ("client.authentication.k8s.io/v1alpha1", "client.authentication.k8s.io/v1beta1")
"""The exec plugins that lightkube asks for a token."""

Kind = TypeVar("Kind", bound=KubernetesObject)
Kept = TypeVar("Kept")


class KubernetesApiUnavailable(errors.PeerUnavailable):
    def __init__(self, subject: str, why: str) -> None:
        super().__init__(f"{subject} cannot be looked up", why=f"the Kubernetes API: {why[:500]}")


class UnusableKubeconfig(InvalidSettings):
    def __init__(self, kubeconfig: str, why: str) -> None:
        errors.InvalidRequest.__init__(
            self,
            "the Kubernetes API cannot be used",
            why=f"{kubeconfig or 'the service account'}: {why}",
            hint="correct kubernetes.kubeconfig, or run the program in a pod with a service account",
        )


class VersionExpiredError(Exception):
    """A watch cannot continue from its version: list again. Only `watch` raises it."""


@dataclass(frozen=True)
class KubernetesApi:
    """Asks one API server. Every method raises `KubernetesApiUnavailable`, which names the question."""

    _http: "httpx2.AsyncClient"

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, kind: type[Kind], name: str, *, namespace: str = "") -> Kind | None:
        """The object, now. None only if the server says that an object of this name does not exist."""
        collection = kind.path
        if namespace:
            prefix, _, plural = collection.rpartition("/")
            collection = f"{prefix}/namespaces/{quote(namespace, safe='')}/{plural}"
        label = f"{namespace}/{name}" if namespace else name
        async with _asking(f"{kind.__name__} {label[:512]}"):
            code, body = await self._answer(f"{collection}/{quote(name, safe='')}", {})
            if code == _NOT_FOUND and _status(body).details.name == name:
                return None
            _check(code, body)
            return kind.model_validate_json(body)

    async def listing(self, kind: type[Kind], **query: str) -> tuple[tuple[Kind, ...], str]:
        """All objects of the kind that the query selects, and the version from which a watch continues.

        The pages are one state of the server: its newest, unless the query has a resourceVersion.
        """
        objects: list[Kind] = []
        query["limit"] = str(_PAGE)
        while True:
            async with _asking(f"the list of {kind.__name__} objects"):
                code, body = await self._answer(kind.path, query)
                _check(code, body)
                page = ListBody[kind].model_validate_json(body)  # type: ignore[valid-type]
            objects += page.items
            if not page.metadata.continue_:
                return tuple(objects), page.metadata.resource_version
            query["continue"] = page.metadata.continue_

    async def watch(
        self, kind: type[Kind], version: str, **query: str
    ) -> AsyncGenerator[tuple[Kind, bool], None]:
        """The objects that changed since a version, and whether each was deleted, until the server ends the watch.

        Raises `VersionExpiredError`, too.
        """
        query |= {"watch": "true", "resourceVersion": version}
        timeout = (_ASK_S, None, _ASK_S, _ASK_S)  # the next change may be hours away
        with _refusals(f"the changes of {kind.__name__} objects"):
            async with self._http.stream(
                "GET", kind.path, params=query, timeout=timeout
            ) as response:
                if response.status_code != _OK:
                    _check(response.status_code, await _body(response))
                async for line in _lines(response):
                    if not line.strip():
                        continue
                    event = WatchEvent.model_validate_json(line)
                    if event.type == "ERROR":
                        _refuse(Status.model_validate(event.object))
                    if event.type in ("ADDED", "MODIFIED", "DELETED"):  # a bookmark may be of null
                        yield kind.model_validate(event.object), event.type == "DELETED"

    async def _answer(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        async with self._http.stream("GET", path, params=query) as response:
            return response.status_code, await _body(response)


def client(kubeconfig: str) -> KubernetesApi:
    """A client by a kubeconfig; empty: by the pod's service account. Raises `UnusableKubeconfig`."""
    try:
        import httpx2
        import lightkube
        import yaml
        from lightkube.config import client_adapter
    except ImportError as error:
        why = "the client of the Kubernetes API is missing: install the wheel of crust with its extra kubernetes"
        raise UnusableKubeconfig(kubeconfig, why) from error
    config = lightkube.KubeConfig
    try:
        loaded = config.from_file(kubeconfig) if kubeconfig else config.from_service_account()
        chosen = loaded.get()
        if chosen is None or httpx2.URL(chosen.cluster.server).scheme not in ("http", "https"):
            raise UnusableKubeconfig(kubeconfig, "it has no server's address with http or https")
        plugin = chosen.user and chosen.user.exec
        if not chosen.user or (plugin and plugin.apiVersion not in _PLUGINS):
            why = f"it names no user, or an exec plugin of an apiVersion other than {_PLUGINS}"
            raise UnusableKubeconfig(kubeconfig, why)
        reached = client_adapter.ConnectionParams(timeout=httpx2.Timeout(_ASK_S), trust_env=False)
        return KubernetesApi(client_adapter.AsyncClient(chosen, reached))
    except (lightkube.ConfigError, OSError) as error:
        raise UnusableKubeconfig(kubeconfig, str(error)) from error
    except KeyError as error:
        raise UnusableKubeconfig(kubeconfig, f"{error} is not set") from error
    except yaml.YAMLError:
        raise UnusableKubeconfig(kubeconfig, "it is not YAML") from None  # its text shows the file
    except (AttributeError, LookupError, TypeError, ValueError, httpx2.InvalidURL) as error:
        # the library's errors for a file of another form; their text does not always help
        why = f"it has not the form of a kubeconfig ({type(error).__name__})"
        raise UnusableKubeconfig(kubeconfig, why) from error


@dataclass(eq=False)
class Informer(Generic[Kind, Kept]):
    """A cache of the objects of one kind that the query selects: the result of `keep` for each, by `key`."""

    api: KubernetesApi
    kind: type[Kind]
    keep: Callable[[Kind], Kept]
    key: Callable[[Kind], str] = lambda item: item.metadata.name
    query: Mapping[str, str] = field(default_factory=dict)
    known: dict[str, Kept] = field(default_factory=dict)
    """The objects, as the last list and the changes since have them; or as they were asked for directly."""
    failure: str = ""
    """Why the objects are not known; empty: they are, or no answer has come yet."""
    _failures: int = 0
    _current: asyncio.Event = field(default_factory=asyncio.Event)

    async def check_known(self, subject: str) -> None:
        """Raise `KubernetesApiUnavailable` unless list and watch work. Waits a few seconds for the next list."""
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._current.wait()
        except TimeoutError as error:
            raise KubernetesApiUnavailable(subject, self.failure or "no answer yet") from error

    async def follow(self) -> None:
        """Keep the objects known, until cancelled. If the API server is away, this logs it and tries again."""
        while True:
            try:
                async with asyncio.timeout(scattered(_RELIST_S)):
                    objects, version = await self.api.listing(self.kind, **self.query)
                    self.known = {self.key(item): self.keep(item) for item in objects}
                    self.failure = ""
                    self._current.set()
                    await self._watch(version)
                    self._failures = 0
            except TimeoutError:
                self._failures = 0
                continue
            except VersionExpiredError:
                pass
            except KubernetesApiUnavailable as error:
                self._lost(error)
                extra = {"error": error, "again_in_s": self._pause_s()}
                _log.warning(f"{self.kind.__name__} objects are not followed", extra=extra)
            except Exception as error:
                self._lost(error)
                raise
            self._current.clear()
            pause_s = self._pause_s()
            self._failures += 1
            await asyncio.sleep(scattered(pause_s))

    def _lost(self, error: Exception) -> None:
        self._current.clear()
        self.failure = str(error) or type(error).__name__

    def _pause_s(self) -> float:
        return _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    async def _watch(self, version: str) -> None:
        changes = self.api.watch(self.kind, version, **self.query)
        async with contextlib.aclosing(changes):
            async for item, is_deleted in changes:
                self._failures = 0
                if is_deleted:
                    self.known.pop(self.key(item), None)
                else:
                    self.known[self.key(item)] = self.keep(item)


@contextlib.asynccontextmanager
async def following(health: Health, *followed: Informer[Any, Any]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for objects in followed:
            name = f"follow {objects.kind.__name__} objects"
            await stack.enter_async_context(supervised(name, objects.follow, health))
        yield


class _AnswerRefused(ValueError):
    """The server's answer has no usable object."""


@contextlib.asynccontextmanager
async def _asking(subject: str) -> AsyncIterator[None]:
    """Ask one question inside the block, in bounded time."""
    with _refusals(subject):
        try:
            async with asyncio.timeout(_ASK_S):
                yield
        except TimeoutError as error:
            raise KubernetesApiUnavailable(subject, f"no answer within {_ASK_S:g} s") from error
        except VersionExpiredError as error:  # between two pages
            raise KubernetesApiUnavailable(subject, str(error)) from error


@contextlib.contextmanager
def _refusals(subject: str) -> Iterator[None]:
    """Failures inside the block become `KubernetesApiUnavailable`."""
    import httpx2
    import lightkube

    try:
        yield
    except (_AnswerRefused, httpx2.HTTPError, lightkube.ConfigError) as error:
        raise KubernetesApiUnavailable(subject, str(error) or type(error).__name__) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        why = f"it answers in another form than Kubernetes' own: {place}: {first['msg']}"
        raise KubernetesApiUnavailable(subject, why) from error
    except (OSError, LookupError, TypeError, ValueError) as error:
        # the file with the token, or the exec plugin: missing, or with an answer of another form
        raise KubernetesApiUnavailable(subject, f"{type(error).__name__}: {error}") from error


async def _body(response: "httpx2.Response") -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _ANSWER_BYTES:
            raise _AnswerRefused(f"its answer is larger than {_ANSWER_BYTES} bytes")
    return bytes(body)


async def _lines(response: "httpx2.Response") -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if max(map(len, (*lines, rest))) > _EVENT_BYTES:
            raise _AnswerRefused(f"it sends an event that is larger than {_EVENT_BYTES} bytes")
        for line in lines:
            yield line


def _check(code: int, body: bytes) -> None:
    if code != _OK:
        status = _status(body)
        _refuse(status if status.code else Status(code=code, message=f"HTTP {code}"))


def _refuse(status: Status) -> None:
    if status.code == _GONE:
        raise VersionExpiredError(status.message)
    raise _AnswerRefused(status.message or f"HTTP {status.code}")


def _status(body: bytes) -> Status:
    """The Status object of a refusal; an empty one for the answer of an HTTP proxy."""
    try:
        return Status.model_validate_json(body)
    except pydantic.ValidationError:
        return Status()
