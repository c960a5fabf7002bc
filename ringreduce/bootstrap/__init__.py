"""How the ranks of a job meet."""
