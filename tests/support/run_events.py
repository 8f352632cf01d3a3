"""Read all that the processes of a run recorded, at once: each process's events, and the problems."""

from pathlib import Path

from flashpatch.verify.read_events import ProcessEvents, Recorded


def read(folder: Path) -> tuple[list[ProcessEvents], list[str]]:
    found = Recorded(folder)
    return [found.of(key) for key in sorted(found.files)], list(found.problems)
