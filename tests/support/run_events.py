"""Read all that the processes of a run recorded, at once."""

from pathlib import Path

from flashpatch.verify.read_events import ProcessEvents, Recorded


def read(folder: Path) -> tuple[list[ProcessEvents], list[str]]:
    """What each process recorded, and the problems."""
    found = Recorded(folder)
    return [found.of(key) for key in sorted(found.files)], list(found.problems)
