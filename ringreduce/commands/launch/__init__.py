"""Starting a job's workers on this host, showing what they say, and ending them all together.

`supervisor` does it; `output` prefixes lines, `failure` finds the first cause, and `guard`
is the small process that ends the workers when the launcher itself is killed.
"""
