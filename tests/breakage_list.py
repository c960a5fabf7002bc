"""The deliberate breakages of `tests/breakages.py`: mistakes that a careless change could make.

They are in `breakage_list.txt`, by the file that each is made in:

    [ringreduce/pure/schedule.py] tests/pure/test_schedule.py
    schedule-rows-twice: With 3, 5 or 6 ranks a small all-reduce writes beyond its memory.
    - tuple(min(distance, size - distance) for distance in distances) => distances

Behind the file are the test files that should catch its mistakes, the quickest first; by default
that of the same name. Behind a mistake's name is what a user would suffer; then what it changes: a
text that occurs once in the file, of lines or parts of them, loses ``-``, gains ``+`` and keeps
``=``; ``- old => new`` is both. Lines go with their ends where nothing takes their place; ``+`` or
``=>`` alone is followed by an empty text.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BREAKAGES", "Breakage", "read"]


@dataclass(frozen=True)
class Breakage:
    """One mistake.

    Attributes:
        name: unique.
        file: which it is made in, from the root of the repository.
        text: occurs there exactly once.
        replacement: what it becomes.
        harm: what a user would suffer.
        tests: files that should catch it, the quickest first.
    """

    name: str
    file: str
    text: str
    replacement: str
    harm: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        """Whether it is in the C library."""
        return self.file.startswith("native/")

    @property
    def digest(self) -> str:
        """Changes with the mistake that is made."""
        parts = repr((self.file, self.text, self.replacement))
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    def applied(self, root: Path) -> str:
        """The file's text with the mistake; ValueError: there is no one place for it."""
        before = (root / self.file).read_text()
        if (found := before.count(self.text)) != 1:
            raise ValueError(f"the text of {self.name} occurs {found} times in {self.file}")
        return before.replace(self.text, self.replacement)


def read(listed: str) -> Iterator[Breakage]:
    """The breakages of such a text."""
    for section in re.split(r"^\[", listed, flags=re.M)[1:]:
        # A name is all that begins a line with a letter.
        header, *mistakes = re.split(r"\n(?=[a-z])", section.rstrip("\n"))
        file, *tests = header.replace("]", "").split()
        tests = tests or [f"tests/{Path(file).parts[1]}/test_{Path(file).stem}.py"]
        for mistake in mistakes:
            name, _, said = re.split(r"\n(?=[-+=])", mistake, maxsplit=1)[0].partition(": ")
            lines = re.sub(r"^(-.*?) =>(?= |$)", r"\1\n+", mistake, flags=re.M)
            changes = re.findall(r"^([-+=]) ?(.*)$", lines, re.M)
            text = "\n".join(line for sign, line in changes if sign != "+")
            replacement = "\n".join(line for sign, line in changes if sign != "-")
            if {sign for sign, _ in changes} == {"-"}:
                text += "\n"
            yield Breakage(name, file, text, replacement, " ".join(said.split()), tuple(tests))


BREAKAGES = tuple(read(Path(__file__).with_suffix(".txt").read_text()))
