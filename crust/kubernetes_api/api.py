"""The client of the Kubernetes API, and the one place where its failures become errors of crust."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import lightkube
import yaml

from crust import errors
from crust.settings.loading import InvalidSettings

_ASK_S = 10.0
"""For one question. A kubelet waits two minutes for its publish, and repeats it."""


class KubernetesApiUnavailable(errors.PeerUnavailable):
    """The Kubernetes API did not answer, or refused to."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"{what} cannot be looked up",
            why=f"the Kubernetes API: {why[:500]}",
            hint="the caller will retry; check the API server, and the kubeconfig and role of this program",
        )


class UnusableKubeconfig(InvalidSettings):
    """The Kubernetes API cannot be reached by the kubeconfig, or by the pod's service account."""

    def __init__(self, kubeconfig: str, why: str) -> None:
        errors.InvalidRequest.__init__(
            self,
            "the Kubernetes API cannot be used",
            why=f"{kubeconfig or 'the service account'}: {why}",
            hint="correct kubernetes.kubeconfig, or run the program in a pod with a service account",
        )


def client(kubeconfig: str) -> lightkube.AsyncClient:
    """A client by a kubeconfig; empty: by the pod's service account. Raises `UnusableKubeconfig`."""
    config = lightkube.KubeConfig
    try:
        found = config.from_file(kubeconfig) if kubeconfig else config.from_service_account()
        chosen = found.get()
        if chosen is None or httpx2.URL(chosen.cluster.server).scheme not in ("http", "https"):
            raise UnusableKubeconfig(kubeconfig, "it has no server's address with http or https")
        return lightkube.AsyncClient(chosen, timeout=httpx2.Timeout(_ASK_S), trust_env=False)
    except InvalidSettings:
        raise
    except (lightkube.ConfigError, OSError) as error:
        raise UnusableKubeconfig(kubeconfig, str(error)) from error
    except KeyError as error:
        raise UnusableKubeconfig(kubeconfig, f"{error} is not set") from error
    except yaml.YAMLError:
        raise UnusableKubeconfig(kubeconfig, "it is not YAML") from None  # its text shows the file
    except (AttributeError, LookupError, TypeError, ValueError, httpx2.InvalidURL) as error:
        # what the library meets in a file of another form; its text does not always help
        why = f"it has not the form of a kubeconfig ({type(error).__name__})"
        raise UnusableKubeconfig(kubeconfig, why) from error


@contextlib.asynccontextmanager
async def asking(what: str) -> AsyncIterator[None]:
    """Ask one question inside the block, in bounded time. Raises `KubernetesApiUnavailable`."""
    try:
        async with asyncio.timeout(_ASK_S):
            yield
    except TimeoutError as error:
        raise KubernetesApiUnavailable(what, f"no answer within {_ASK_S:g} s") from error
    except httpx2.HTTPError as error:
        raise KubernetesApiUnavailable(what, reason(error)) from error


def reason(error: httpx2.HTTPError) -> str:
    """The error in words; some have none of their own."""
    return str(error) or type(error).__name__
