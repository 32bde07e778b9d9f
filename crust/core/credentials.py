"""Hides credentials in the text of other programs, before it reaches a log line or an event.

A driver may put its mount options into an error, a library its arguments into an exception. A credential is guessed
by its name (`password=`, `--token`, `Authorization:`, a login in a URL) or by its form (a JSON web token, a key of
Ceph or NVMe, a private key in PEM); where the request is known, `crust.rpc.messages.redaction` hides the values of
its secrets as well.

The text may be hostile, and the event loop searches it. So it is cut first (`shown`), and every pattern takes time in
proportion to its length: a name is tried only where it begins, quantifiers are possessive (`++`, `*+`), and an
unclosed quote ends with the text.
"""

import re

HIDDEN = "***"

SHOWN_MAX_CHARS = 4096
"""The length of another program's text in a log line, an event or an answer."""

_WORDS = "pass|secret|token|cred|key|pwd|psk"
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
    # A header of HTTP, also in Go's map of them: the scheme and its parameter, or one word.
    re.compile(
        r"""(authorization\\{0,3}["']?\s{0,3}[:=]\s{0,3}\[?\\{0,3}["']?)"""
        r"""((?:[\w-]{1,20}\s{1,3})?[^\s,;()\[\]{}"'\\]++)""",
        _FLAGS,
    ),
    # A sentence. Names of Kubernetes' secrets and their keys are quoted too, so these words alone.
    re.compile(rf"((?<![\w-])(?:password|passphrase|passwd|pwd|psk)\s{{1,3}})({_QUOTED})", _FLAGS),
    re.compile(
        r"((?<![\w-])(?:password|passphrase|passwd|pwd|psk)\s{1,3}is\s{1,3})"
        r"(?!(?:not|no|missing|empty|wrong|required|invalid|incorrect|too|the|a|in|of)\b)" + _VALUE,
        _FLAGS,
    ),
    # A variable of the environment and its value: AWS_SECRET_ACCESS_KEY x.
    re.compile(
        rf"((?<!\w)(?=[A-Z0-9_]*?_)(?=[A-Z0-9_]*?(?:SECRET|TOKEN|PASS|KEY))[A-Z0-9_]++\s{{1,3}}){_VALUE}",
        re.DOTALL,
    ),
    re.compile(r"()((?<![\w-])eyJ[\w-]{8,}+\.[\w-]++(?:\.[\w-]++)?)"),
    re.compile(r"()((?<![\w+/])AQ[\w+/]{20,}+={1,2})"),  # cephx
    re.compile(r"()((?<![\w-])(?:DHHC|NVMeTLSkey)-1:\d\d:[^\s:]{8,}+:?)"),  # NVMe in-band, TLS
    re.compile(r"()((?<![\w-])hvs\.[\w-]{16,}+)"),  # Vault
    re.compile(r"(://)([^/\s@]{1,256}+(?=@))"),
)
_HINTS = (
    *_WORDS.split("|"), "bearer", "eyj", "://", "authorization", "aq", "dhhc-1", "hvs."
)  # fmt: skip
"""Searched for first, without a pattern: every text of every log line passes here, and few contain a hint."""

_PRIVATE_KEY_MAX_CHARS = 16 << 10
"""Of a key with the head that a log puts before each line: RSA of 8192 bits has 6,400 without."""

_PEM = re.compile(
    r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----"
    rf"(?:(?!-----END )[\s\S]){{0,{_PRIVATE_KEY_MAX_CHARS}}}+"
    r"(?:-----END [A-Z ]{0,32}PRIVATE KEY-----)?"
)
_PEM_END = re.compile(r"-----END [A-Z ]{0,32}PRIVATE KEY-----")


def hidden(text: str) -> str:
    """`text` with `***` in place of each credential that a pattern finds."""
    folded = text.casefold()
    if not any(hint in folded for hint in _HINTS):
        return text
    text = _without_private_keys(text)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def hidden_lines(text: str) -> str:
    """As `hidden`, for a text of many lines: a private key has several, all other patterns are of one."""
    return "\n".join(map(hidden, _without_private_keys(text).split("\n")))


def _without_private_keys(text: str) -> str:
    """A key that has no end, or no beginning because the text begins within it, is hidden as far as one is long."""
    text = _PEM.sub(HIDDEN, text)
    if (end := _PEM_END.search(text)) is None:
        return text
    before = text[: max(0, end.start() - _PRIVATE_KEY_MAX_CHARS)]
    return before + HIDDEN + _PEM_END.sub(HIDDEN, text[end.end() :])


def shown(text: str) -> str:
    """The beginning of another program's text, with credentials hidden, for logs and answers."""
    if len(text) <= SHOWN_MAX_CHARS:
        return hidden(text)
    # Twice the shown length is searched, so that the cut leaves no half of a credential.
    return f"{hidden(text[: 2 * SHOWN_MAX_CHARS])[: SHOWN_MAX_CHARS - 1]}…"
