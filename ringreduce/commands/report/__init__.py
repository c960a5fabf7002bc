"""``ringreduce report DIR``: all ranks' flight records in, who is to blame out."""
