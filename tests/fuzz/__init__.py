"""A fuzzer of whole programs: random models run in a scope and as the plain loop, which is the oracle.

`python -m fuzz` (with `tests` on the path; `make fuzz` does it) draws them by number, and shrinks what differs.
"""
