"""Data divided among ranks: arrays, datasets, shares, and whether all read the same."""
