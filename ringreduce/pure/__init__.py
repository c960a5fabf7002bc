"""Arithmetic and decisions: no I/O, threads, clock or environment."""
