"""Models in stages, each on ranks of its own."""
