"""Name, write and find ledger files, and detect a reused PID.

Processes that never import a framework write a row too, so this imports little."""

from __future__ import annotations

import os
import stat
import sys
import time

from flashpatch import plain_json, user_directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


def directory() -> Path:
    """The ledger: ``FLASHPATCH_LEDGER``, else ``flashpatch/ledger`` in the user's cache directory.

    A Ray worker has ``FLASHPATCH_JOB_LEDGER`` too, the directory of the process that started the job: it comes before
    the cache directory if this user may write to it, and ``FLASHPATCH_LEDGER`` is not used if it is the same
    directory and they may not, as on another node or in a container."""
    from pathlib import Path

    return Path(_directory())


def _directory() -> str:
    chosen = user_directories.expand(os.environ.get("FLASHPATCH_LEDGER", ""))
    job = os.environ.get("FLASHPATCH_JOB_LEDGER", "")
    if chosen and chosen != job:
        return chosen
    if job and user_directories.is_writable(job):
        return job
    return os.path.join(user_directories.cache_home(), "flashpatch", "ledger")


def row_path() -> str:
    """The file of this process's row. Sets ``FLASHPATCH_RUN``, see `run_id`."""
    pid, start = identity()
    return os.path.join(_directory(), run_id(), file_name("row", host(), pid, start))


def identity() -> tuple[int, str]:
    """Pid and start of this process; if the platform does not say when it began, the time now stands in, once per process."""
    return _known()[:2]


def _known() -> tuple[int, str, float, int]:
    """Return `identity`, when it was first asked for, seconds since 1970, and who had started this process: an orphan's
    parent is another."""
    global _process
    pid = os.getpid()
    if _process is None or _process[0] != pid:
        _process = pid, process_start(pid) or str(time.time_ns()), round(time.time(), 3), os.getppid()
    return _process


_process: tuple[int, str, float, int] | None = None


def _begins() -> bool:
    """Return whether the run begins in this process, the first that writes a row, and tell its children: ``FLASHPATCH_BEGUN`` names
    that row. It never begins in a process of Ray's own, which serves jobs and is none."""
    run, begun = run_id(), os.environ.get("FLASHPATCH_BEGUN", "")
    here = f"{run}/{file_name('row', host(), *identity())}"
    if begun.startswith(f"{run}/"):
        return begun == here  # after an exec, too
    if any(part in word for word in sys.orig_argv[1:4] for part in _RAYS):
        return False
    os.environ["FLASHPATCH_BEGUN"] = here
    return True


_RAYS = "/bin/ray", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/"


def row(
    engine: Mapping[str, Any],
    roles: tuple[str, ...] = (),
    rank: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    ended: str = "",
) -> dict[str, Any]:
    """A row of this process, now, from `flashpatch.engine.snapshot` and what `flashpatch.ledger.role` and ``note`` were given;
    ``ended`` says how the process ends, at its end."""
    pid, start, first_written, parent = _known()
    return {
        "kind": "row",
        "run": run_id(),
        "host": host(),
        "pid": pid,
        "start": start,
        "ppid": parent,
        "argv0": sys.argv[0] if getattr(sys, "argv", None) else "",
        "title": actor(),
        "roles": sorted(roles),
        "rank": dict(rank or {}),
        "versions": {"python": sys.version.split()[0], **engine.get("versions", {})},
        "patches": engine.get("patches", {}),
        "on": engine.get("on", {}),
        "notes": dict(notes or {}),
        "error": engine.get("error"),
        "ended": ended,
        "engine": os.environ.get("FLASHPATCH_ENGINE", ""),
        "first": _begins(),
        "first_written": first_written,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_row(value: dict[str, Any]) -> bool:
    """Write this process's row; return whether the run's directory was made. Patches that wait or are skipped are hundreds, and
    alike in most processes: they are a file of their own, ``idle-<host>-0-<checksum>.json``, written once."""
    patches, made = value["patches"], False
    rests = "waiting", "skipped"
    idle = {id: one for id, one in patches.items() if not one["calls"] and one["state"] in rests}
    if idle:
        import zlib

        data = plain_json.dumps(idle).encode()
        name = f"{zlib.crc32(data):08x}{len(data)}"
        value |= {"idle": name, "patches": {id: one for id, one in patches.items() if id not in idle}}
        beside = os.path.join(os.path.dirname(row_path()), file_name("idle", value["host"], 0, name))
        made = not os.path.exists(beside) and write_bytes(beside, data)
    try:
        return write(row_path(), value) or made
    except OSError:
        if value["ended"]:
            _end_in_place(value["ended"])
        raise


def _end_in_place(ended: str) -> None:
    """Say how this process ends in the row that is there, within the blocks that it has: a full disk takes no other file."""
    import json

    with open(row_path(), "r+b") as file:
        data = plain_json.dumps(json.load(file) | {"ended": ended}).encode()
        data = data.ljust(file.tell())
        if len(data) <= os.fstat(file.fileno()).st_blocks * 512:
            file.seek(0)
            file.write(data)


def is_own_command(argv0: str) -> bool:
    """Whether a process that was started so is ``flashpatch`` or ``flashpatch-verify``, or a process of its own."""
    return argv0.removesuffix("/__main__.py").rpartition("/")[2] in ("flashpatch", "flashpatch-verify")


def actor() -> str:
    """Return the class of the actor of Ray that this process is, by the title that Ray gives it; else empty."""
    if "ray" not in sys.modules:
        return ""
    try:
        with open("/proc/self/cmdline", errors="replace") as file:
            title = file.read(200).partition("\0")[0]
    except OSError:
        return ""
    name = title.removeprefix("ray::").partition(".")[0] if title.startswith("ray::") else ""
    return name if name.isidentifier() and name != "IDLE" else ""


def run_id() -> str:
    """Return this job's id: ``FLASHPATCH_RUN``, set here by the first process so that children inherit it.

    The value becomes a directory name, so anything but letters, digits, ``._-`` is replaced."""
    value = os.environ.get("FLASHPATCH_RUN")
    if not value:
        value = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        os.environ["FLASHPATCH_RUN"] = value
    return plain(value)


def host() -> str:
    return plain(os.uname().nodename)


def file_name(kind: str, at: str, pid: int, start: str) -> str:
    """``row-<host>-<pid>-<start>.json`` or ``expect-...``."""
    return f"{kind}-{plain(at)}-{pid}-{plain(start) or 'unknown'}.json"


def process_start(pid: int) -> str | None:
    """Return the start time of a running process of this host, in clock ticks since boot, as text.

    None when it is gone or a zombie; ``""`` when it runs but this platform (no ``/proc``) does not say.
    Source: ``proc(5)``, fields 3 and 22 of ``/proc/<pid>/stat``."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # of another user
            pass
        return ""
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def write(path: str | os.PathLike[str], value: Mapping[str, Any]) -> bool:
    """Replace ``path`` with ``value`` as JSON; see `write_bytes`."""
    return write_bytes(path, plain_json.dumps(value).encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> bool:
    """Replace ``path`` atomically, readable by its owner only.

    The directory is made private (0700) if it is missing. Raises OSError, also when the directory is another user's or a link.

    Returns:
        Whether the directory was made."""
    folder, name = os.path.split(path)
    made = make_private(folder)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise
    return made


def load_bytes(path: str, largest: int, end: bool = False, forbidden: int = 0) -> tuple[bytes, float]:
    """Return content and time of modification of a plain file of this user; with ``end`` its last ``largest`` bytes.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is no plain file, another user's, has one of the ``forbidden`` bits of mode, or, without ``end``,
            is of more than ``largest`` bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a plain file")
        if found.st_uid != os.geteuid():
            raise ValueError(f"owned by user {found.st_uid}, not trusted")
        if found.st_mode & forbidden:
            raise ValueError(f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}), not trusted")
        if found.st_size > largest and not end:
            raise ValueError(f"{found.st_size} bytes, more than {largest}")
        file.seek(max(found.st_size - largest, 0))
        return file.read(), found.st_mtime


def make_private(folder: str) -> bool:
    """Make a directory with mode 0700 if it is missing; return whether it was made. Raises OSError if it is another user's, or a link."""
    user_directories.check(folder)
    made = _make(folder or ".")
    found = os.lstat(folder or ".")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a directory of this user")
    return made


def _make(folder: str) -> bool:
    """Make a directory, and those above it, if it is missing; return whether it was made."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if os.path.isdir(above := os.path.dirname(folder) or "."):  # and takes none, as /proc
            raise
        _make(above)
        return _make(folder)
    return True


def plain(text: str) -> str:
    """``text`` as part of a file's name: other characters than letters, digits, ``._-`` are replaced."""
    return "".join(letter if letter in _PLAIN else "-" for letter in text).lstrip(".")[:100]


def name_and_options(family: str, on: Mapping[str, Any]) -> str:
    """Return a family of a row's ``on`` as the user chose it: its name, and the options that are not at their default."""
    options = ", ".join(f"{key}={value}" for key, value in on.get("options", {}).items())
    return on.get("name", family) + (f" ({options})" if options else "")
