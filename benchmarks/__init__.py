"""Measurements of crust, made in one run on one machine: `make bench`, or `python -m benchmarks NAME…`.

The rule: what is compared is measured together, in rounds (A, B, A, B …), so that a busy machine spoils both sides
alike; what is told is medians, 99th percentiles, ratios of medians, and the count. A benchmark is no timed test:
nothing here fails because a machine is slow. The goals beside the figures are the project's, and a figure that
misses its goal says so in the page.

Each benchmark is one file with a frozen result type; a full run writes docs/benchmarks.md and its plot, a partial one
only prints. Everything is made below one temporary directory, and the processes, mounts and loop devices go with
the run, failed or not.
"""
