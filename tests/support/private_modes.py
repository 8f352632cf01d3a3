"""Find files that other users of the host may open."""

import os
import stat
from pathlib import Path


def loose(folder: Path) -> list[str]:
    """Return what is not private below a directory, the directory itself included: path and mode."""
    found = []
    for path in (folder, *sorted(folder.rglob("*"))):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        if not path.is_symlink() and mode != (0o700 if path.is_dir() else 0o600):
            found.append(f"{path.relative_to(folder.parent)} {mode:o}")
    return found
