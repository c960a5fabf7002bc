"""Starting a job's workers on this host, showing what they say, and ending them all together.

`supervisor` does it: `processes` are started, their lines (`output`) go to the `screen`, `failure`
finds the first cause, and `guard` ends the workers when the launcher itself is killed.
"""
