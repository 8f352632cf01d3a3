"""Replace files atomically: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None, private: bool = True) -> Iterator[Path]:
    """Give a path to write to, which replaces ``path`` when the block ends without an exception.

    Nothing is synced to disk: after a crash of the machine, not of the process, the content may be lost.

    Args:
        path: the file to replace; its directory must exist by the end of the block.
        temporary: where to write, on the same file system; by default a hidden file beside ``path`` whose
            name has this process's PID. Threads that may write the same file at once give one each.
        private: give the file mode 0600; else that of the user's umask.

    Yields:
        The temporary path. It is removed when the block raises, and ``path`` stays as it was.

    Raises:
        OSError: the file cannot be made or moved."""
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if private:
            os.chmod(temporary, 0o600)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
