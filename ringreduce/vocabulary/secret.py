"""Checks a job's secret, and reads it from a file. It is never shown."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

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


def users_secret(home: str, *, makes_one: bool) -> str:
    """The secret in ``.ringreduce/secret`` of the user's `home`, for jobs of other launchers.

    `home` is an absolute path, or empty. With `makes_one` the file is made if `home` is the user's
    own; processes that do so at the same time get the same secret. Empty where there is no file and
    none can be made. Raises as `read_secret`.
    """
    path = Path(home, ".ringreduce", "secret")
    if not path.is_absolute():
        return ""
    # `os.path`, which takes a home that may not be read for one without a file.
    if makes_one and not os.path.exists(path):
        with contextlib.suppress(OSError):
            # Else root, with the user's HOME, would leave a file that the user cannot read.
            if os.stat(home).st_uid == os.geteuid():
                _make_file(path)
    return read_secret(str(path), f"the file {path}") if os.path.exists(path) else ""


def _make_file(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # A link appears with its whole content, also in a home on NFS; the first one stays.
    draft = path.with_name(f"draft-{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(draft, path)
    finally:
        draft.unlink()


def read_secret(path: str, named: str = "") -> str:
    """The secret in the file at `path`, which errors call `named`, without white space around it.

    Raises ConfigError if it is not a regular file that only its owner may read, or holds no secret.
    """
    named = named or f"the file {path} of RINGREDUCE_SECRET_FILE"
    try:
        # Without O_NONBLOCK a pipe or device could block here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            # The open file's, since the name may be another file's by now.
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
