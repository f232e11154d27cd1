"""Benchmarks: workloads, systems, and the harness that runs them side by side. See docs/benchmarks.md."""
