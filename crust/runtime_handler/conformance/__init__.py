"""`crust conformance --runtime`: the duties of specs/handoff.md as numbered cases against any runtime that registers.

    case         a case: number, clauses, strength, title
    subject      the runtime under test: its process, its answers, and the volumes that are published to it
    claim_cases, record_cases, call_cases
    suite        runs the cases and prints one line for each

The test kit's proxy (`crust.runtime_handler.testing`) is in front of the runtime. How a sandbox is started is the
runtime's own business, so the command under test reads lines and answers each with one: docs/runtime-author.md.
"""
