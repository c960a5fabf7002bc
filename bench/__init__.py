"""Benchmarks; run as ``python -m bench`` from the top of the repository. See README.md."""
