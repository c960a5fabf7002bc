"""Variables of which each rank of a group holds a piece, and the layers that have them."""

from ringreduce.keras.layers.embedding import look_up
from ringreduce.keras.layers.part_layer import PartLayer
from ringreduce.keras.layers.summary import summary
from ringreduce.keras.weighting import in_parts

__all__ = ["PartLayer", "in_parts", "look_up", "summary"]
