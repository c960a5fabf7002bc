"""The files of ``--log-dir`` that keep each worker's lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringreduce.commands.launch.output import last_state, without_colors
from ringreduce.vocabulary.errors import ConfigError


class Logs:
    """Writes the lines of `ranks` into ``rank-0.log`` and so on, which are empty at first.

    Raises:
        ConfigError: `folder` cannot be made or written to.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        self._files = {rank: folder.absolute() / f"rank-{rank}.log" for rank in ranks}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in self._files.values():
                file.write_bytes(b"")
        except OSError as error:
            raise ConfigError(
                f"cannot keep the workers' output in {folder}: {error}",
                remedy="Give --log-dir, or RINGREDUCE_LOG_DIR, a folder that can be written to.",
            ) from error

    def write(self, rank: int, lines: Sequence[str]) -> None:
        """Add whole lines of one worker. Raises OSError, as on a full disk."""
        with self._files[rank].open("a", encoding="utf-8") as file:
            file.writelines(f"{without_colors(last_state(line))}\n" for line in lines)
