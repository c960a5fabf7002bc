"""How segments travel between neighbours; one file for each way."""
