"""The command line: starts workers, and explains how a job failed."""
