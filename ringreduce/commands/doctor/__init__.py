"""``ringreduce doctor``: forms a ring, and says what would stop or slow a job on these hosts."""
