"""Checks a job's secret, and reads it from a file. It is never shown."""

from __future__ import annotations

import os
import stat

from ringreduce.vocabulary.errors import ConfigError

# 16 characters of base64 are 96 bits. A file with more than 4096 is the wrong one.
_CHARACTERS_MIN, _CHARACTERS_MAX = 16, 4096


def check_secret(secret: str, source: str) -> None:
    """Raise ConfigError if `secret` is too short or too long; the error does not show it."""
    if not _CHARACTERS_MIN <= len(secret) <= _CHARACTERS_MAX:
        raise ConfigError(
            f"the secret has {len(secret)} characters, from {source}; "
            f"accepted: {_CHARACTERS_MIN} to {_CHARACTERS_MAX}",
            remedy="`openssl rand -hex 32` makes a good one.",
        )


def read_secret(path: str) -> str:
    """The secret in the file at `path`, without white space around it.

    Raises:
        ConfigError: it is not a regular file that only its owner may read, or holds no secret.
    """
    named = f"the file {path} of RINGREDUCE_SECRET_FILE"
    try:
        # Without O_NONBLOCK a pipe or device could block here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            # Of the open file, since the name may be another file's by now.
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{named} is no regular file")
            # Root may own it: root can read everything, and owns mounted secrets.
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{named} belongs to another user", remedy="Make a copy.")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{named} may be read or changed by other users "
                    f"(its mode is {stat.S_IMODE(status.st_mode):o})",
                    remedy=f"chmod 600 {path}",
                )
            secret = file.read(_CHARACTERS_MAX * 4 + 1).decode().strip()
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        # Without the cause, whose text would contain the secret.
        raise ConfigError(f"{named} is no text") from None
    check_secret(secret, named)
    return secret
