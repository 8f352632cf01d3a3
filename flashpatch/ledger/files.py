"""Locate and write the ledger's files, and detect a reused PID."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.atomic_file import replacing


def directory() -> Path:
    """Return the ledger: ``FLASHPATCH_LEDGER``, else ``flashpatch/ledger`` in the user's cache directory."""
    chosen = os.environ.get("FLASHPATCH_LEDGER")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "flashpatch" / "ledger"


def run_id() -> str:
    """Return this job's id: ``FLASHPATCH_RUN``, set here by the first process so that children inherit it.

    The value becomes a directory name, so anything but letters, digits, ``._-`` is replaced.
    """
    value = os.environ.get("FLASHPATCH_RUN")
    if not value:
        value = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        os.environ["FLASHPATCH_RUN"] = value
    return _plain(value)


def host() -> str:
    return _plain(os.uname().nodename)


def file_name(kind: str, at: str, pid: int, start: str) -> str:
    """Return ``row-<host>-<pid>-<start>.json`` or ``expect-...``."""
    return f"{kind}-{_plain(at)}-{pid}-{_plain(start) or 'unknown'}.json"


def process_start(pid: int) -> str | None:
    """Return the start time of a running process of this host, in clock ticks since boot, as text.

    None when it is gone or a zombie; ``""`` when it runs but this platform (no ``/proc``) does not say.
    Source: ``proc(5)``, fields 3 and 22 of ``/proc/<pid>/stat``.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _signalled(pid)
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically with ``value`` as JSON, readable by its owner only.

    The directory is made private (0700) if it is missing. Raises OSError, also when the directory is
    another user's or a link.
    """
    _private(path.parent)
    data = json.dumps(value, default=repr).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with replacing(path) as temporary, open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)


def _private(folder: Path) -> None:
    for missing in [*reversed(folder.parents), folder]:
        if not missing.exists():
            missing.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a directory of this user")


def _signalled(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".")[:100]
