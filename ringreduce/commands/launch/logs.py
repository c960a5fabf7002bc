"""The files of ``--log-dir`` that keep each worker's lines."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ringreduce.commands.launch.output import last_state, without_colors
from ringreduce.vocabulary.errors import ConfigError


class Logs:
    """Writes the lines of `ranks` into ``rank-0.log`` and so on; closed with its context.

    Raises:
        ConfigError: `folder` cannot be made or written to.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        with contextlib.ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._files = {
                    rank: stack.enter_context(
                        (folder / f"rank-{rank}.log").open("w", encoding="utf-8")
                    )
                    for rank in ranks
                }
            except OSError as error:
                raise ConfigError(
                    f"cannot keep the workers' output in {folder}: {error}",
                    remedy="Give --log-dir, or RINGREDUCE_LOG_DIR, a folder that can be "
                    "written to.",
                ) from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stack.close()

    def write(self, rank: int, lines: Sequence[str]) -> None:
        """Add whole lines of one worker. Raises OSError, as on a full disk."""
        self._files[rank].writelines(f"{without_colors(last_state(line))}\n" for line in lines)
        self._files[rank].flush()
