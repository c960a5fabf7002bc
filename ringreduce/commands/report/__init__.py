"""``ringreduce report DIR``: reads all ranks' flight records and says which rank is to blame."""
