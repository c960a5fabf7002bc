"""Warnings of settings, for tests."""

import contextlib
import logging
from collections.abc import Callable

import pytest

from ringreduce.vocabulary import launched
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ConfigError


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Reads settings from variables, and returns the warnings, even if they are refused."""

    def read(variables: dict[str, str]) -> list[str]:
        launched._log_once.cache_clear()
        with caplog.at_level(logging.WARNING, "ringreduce"), contextlib.suppress(ConfigError):
            Config.from_environment(variables)
        return [record.getMessage() for record in caplog.records]

    return read
