"""Hides what looks like a credential in the text of other programs, before it reaches a log line or an event.

A driver may put its mount options into an error, a library its arguments into an exception. This is a guess by name
(`password=`, `--token`, a login in a URL, a JSON web token); where the request is known,
`crust.rpc.messages.redaction` hides the values of its secrets as well. Every pattern is bounded, because the text may
be hostile.
"""

import re

HIDDEN = "***"

_WORDS = "pass|secret|token|cred|key"
_QUOTED = r"""\\{1,3}"[^"]{0,4096}"|"(?:[^"\\]|\\.){0,4096}"|'(?:[^'\\]|\\.){0,4096}'"""
_VALUE = rf"""({_QUOTED}|[^\s,;&()\[\]{{}}"']+)"""
_PATTERNS = (
    re.compile(rf"""((?:{_WORDS})[\w./-]{{0,64}}["']?\s{{0,3}}=\s{{0,3}}){_VALUE}""", re.I),
    re.compile(
        r"""((?:password|passwd|passphrase|secret|token|credential|api[_-]?key)s?\\{0,3}["']?\s{0,3}:\s{0,3})"""
        + _VALUE,
        re.I,
    ),
    # A key of JSON or of a dictionary, also of one that is quoted in another: {"userKey": "…"}.
    re.compile(
        rf"""(["'][^"'\\]{{0,64}}(?:{_WORDS})[^"'\\]{{0,64}}\\{{0,3}}["']\s{{0,3}}:\s{{0,3}})({_QUOTED})""",
        re.I,
    ),
    re.compile(rf"""(--?[\w-]{{0,64}}(?:{_WORDS})[\w-]{{0,64}}\s{{1,3}}){_VALUE}""", re.I),
    re.compile(r"(bearer\s{1,3})([\w.~+/=-]{8,})", re.I),
    re.compile(r"()(\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?)"),
    re.compile(r"(://)([^/\s@]{1,256}(?=@))"),
)
_HINTS = (*_WORDS.split("|"), "bearer", "eyj", "://")
"""Looked for first, without a pattern: every text of every log line passes here, and hardly one has any of them."""


def hidden(text: str) -> str:
    """`text` with `***` in place of what looks like a credential."""
    folded = text.casefold()
    if not any(hint in folded for hint in _HINTS):
        return text
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text
