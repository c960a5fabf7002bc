"""Spark starts the ranks: `run` calls a function on each, `shard` gives one its rows.

from ringreduce import spark

def train(epochs):
    import ringreduce.keras as rr

    rr.init()
    x, y = spark.shard("features", "label")
    ...

spark.run(train, (5,), num_proc=4, dataframe=df)
"""

try:
    import pyarrow  # noqa: F401
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ringreduce.spark needs Spark and Arrow, and {error.name} is not installed: "
        'pip install "ringreduce[spark]"',
        name=error.name,
    ) from error

from ringreduce.spark.function import run
from ringreduce.spark.rows import shard

__all__ = ["run", "shard"]
