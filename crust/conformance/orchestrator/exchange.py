"""A request and its answer, as a report shows them: one line each, without secrets."""

import json
from dataclasses import dataclass

from google.protobuf.message import Message

from crust.rpc.messages import redaction

_SHOWN = 700
"""Enough for every request of the suite but those that test size limits."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was sent, and what came back: the code, with the refusal's message or the answer."""

    sent: str
    got: str


NONE = Exchange("", "")
"""Before the first call of a case."""


def of(request: Message, code: str, answer: Message | str, *, times: int = 1) -> Exchange:
    """One call, or `times` equal ones at once."""
    at_once = f"{times} at once: " if times > 1 else ""
    if isinstance(answer, Message):
        got = f"{code} {_shown(answer)}"
    else:
        got = f"{code}: {redaction.without_secrets(answer, '', request)}"
    return Exchange(f"{at_once}{_shown(request)}", _cut(got))


def _shown(message: Message) -> str:
    fields = json.dumps(redaction.describe(message), ensure_ascii=False, default=repr)
    return _cut(f"{message.DESCRIPTOR.name} {fields}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
