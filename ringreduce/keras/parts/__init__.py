"""Variables of which each rank of a group holds a piece, and the layers that have them."""

from ringreduce.keras.parts.summary import summary

__all__ = ["summary"]
