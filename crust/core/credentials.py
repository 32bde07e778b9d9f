"""Hides credentials in the text of other programs, before it reaches a log line or an event.

A driver may put its mount options into an error, a library its arguments into an exception. A credential is guessed
by its name (`password=`, `--token`, a login in a URL, a JSON web token); where the request is known,
`crust.rpc.messages.redaction` hides the values of its secrets as well.

The text may be hostile, and the event loop searches it. So it is cut first (`shown`), and every pattern takes time in
proportion to its length: a name is tried only where it begins, quantifiers are possessive (`++`, `*+`), and an
unclosed quote ends with the text.
"""

import re

HIDDEN = "***"

SHOWN_MAX_CHARS = 4096
"""The length of another program's text in a log line, an event or an answer."""

_WORDS = "pass|secret|token|cred|key"
_QUOTED = r"""\\{1,3}"[^"]*+"?|"(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?"""
_VALUE = rf"""({_QUOTED}|[^\s,;&()\[\]{{}}"']++)"""
_FLAGS = re.IGNORECASE | re.DOTALL
_PATTERNS = (
    re.compile(
        rf"""((?<![\w./-])(?=[\w./-]*?(?:{_WORDS}))[\w./-]++["']?\s{{0,3}}=\s{{0,3}}){_VALUE}""",
        _FLAGS,
    ),
    re.compile(
        r"""((?:password|passwd|passphrase|secret|token|credential|api[_-]?key)s?\\{0,3}["']?\s{0,3}:\s{0,3})"""
        + _VALUE,
        _FLAGS,
    ),
    # A key of JSON or of a dictionary, also where it is quoted in another one: {"userKey": "…"}.
    re.compile(
        rf"""(["'](?=[^"'\\]*?(?:{_WORDS}))[^"'\\]*+\\{{0,3}}["']\s{{0,3}}:\s{{0,3}})({_QUOTED})""",
        _FLAGS,
    ),
    re.compile(rf"""((?<![\w-])--?(?=[\w-]*?(?:{_WORDS}))[\w-]++\s{{1,3}}){_VALUE}""", _FLAGS),
    re.compile(r"(bearer\s{1,3})([\w.~+/=-]{8,}+)", _FLAGS),
    re.compile(r"()((?<![\w-])eyJ[\w-]{8,}+\.[\w-]++(?:\.[\w-]++)?)"),
    re.compile(r"(://)([^/\s@]{1,256}+(?=@))"),
)
_HINTS = (*_WORDS.split("|"), "bearer", "eyj", "://")
"""Searched for first, without a pattern: every text of every log line passes here, and few contain a hint."""


def hidden(text: str) -> str:
    """`text` with `***` in place of each credential that a pattern finds."""
    folded = text.casefold()
    if not any(hint in folded for hint in _HINTS):
        return text
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def shown(text: str) -> str:
    """The beginning of another program's text, with credentials hidden, for logs and answers."""
    if len(text) <= SHOWN_MAX_CHARS:
        return hidden(text)
    # Twice the shown length is searched, so that the cut leaves no half of a credential.
    return f"{hidden(text[: 2 * SHOWN_MAX_CHARS])[: SHOWN_MAX_CHARS - 1]}…"
