"""The duties of specs/handoff.md as numbered cases against any runtime that registers: `crust-conformance --runtime`.

The test kit's proxy (`testing`) is in front of the runtime. Each runtime starts sandboxes in its own way, so the
command under test reads lines and answers each with one line: docs/runtime-author.md.
"""
