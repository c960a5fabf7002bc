"""Names of the dtypes to which gradients are rounded before they travel."""

from __future__ import annotations

__all__ = ["Compression"]


class Compression:
    """What `DistributedOptimizer(compression=...)` accepts; the names are Horovod's.

    Sums are made in float32 and divided before they are rounded, so that only a single gradient or
    a mean can be too large for the dtype.

    Attributes:
        none: gradients travel as they are.
        fp16: as float16: 11 significant bits, at most 65504, coarser below 6e-5. Meant for a scaled
            loss (mixed_float16), where overflow becomes infinity and all ranks skip the step.
        bf16: as bfloat16: 8 significant bits, and the range of float32.
    """

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
