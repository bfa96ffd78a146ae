"""Benchmarks. Run from the repository root: `python -m benchmarks.attention --help`."""
