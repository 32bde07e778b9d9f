"""Measurements of crust, made in one run on one machine: `make bench`, or `python -m benchmarks NAME…`.

The rule: alternatives are measured together, in rounds (A, B, A, B …), so that other load on the machine affects
both alike. The page shows medians, 99th percentiles, ratios of medians, and counts. A benchmark is not a timed
test: nothing here fails because a machine is slow. The page compares the figures with the project's goals.

Each benchmark is one file with a frozen result type; a full run writes docs/benchmarks.md and its plot, a partial run
only prints. All files are below one temporary directory, and the run always removes its processes, mounts and loop
devices.
"""
