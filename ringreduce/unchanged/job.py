"""Which rank this process is, before it has joined a ring."""

from functools import cache

from ringreduce.vocabulary.config import Config


@cache
def job() -> Config:
    """This rank's settings, as they were when the program began."""
    return Config.from_environment()
