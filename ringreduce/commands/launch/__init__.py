"""Starts a job's workers on this host, shows their output, and ends them together."""
