"""Find directories for this user's files, also if the user has no home directory.

Containers run processes under a uid that the system does not know: ``HOME`` is unset or leads to a directory that
they may not write to. Then one private directory per uid beside other temporary files takes its place. Processes
that never import a framework need this at their start, so it imports little."""

from __future__ import annotations

import os
import stat

_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_warned = False
_inherited = "FLASHPATCH_RESOLVED" in os.environ
"""Whether another process of this job came before, which has warned."""


def cache_home() -> str:
    """The directory for what may be made anew: ``XDG_CACHE_HOME``, ``~/.cache`` or ``XDG_STATE_HOME``, the first
    that this user may write to; else `fallback`."""
    home = os.path.expanduser("~")
    candidates = (
        os.environ.get("XDG_CACHE_HOME", ""),
        os.path.join(home, ".cache") if os.path.isabs(home) and home != "/" else "",
        os.environ.get("XDG_STATE_HOME", ""),
    )
    return next((folder for folder in candidates if folder and is_writable(folder)), None) or fallback()


def expand(path: str) -> str:
    """``path`` with ``~`` at its start replaced by the user's home directory, or by `fallback` without one."""
    expanded = os.path.expanduser(path)
    first, _, rest = path.partition("/")
    if first != "~" or expanded != path:
        return expanded
    return os.path.join(fallback(), rest) if rest else fallback()


def fallback() -> str:
    """The directory ``flashpatch-<uid>`` for temporary files, made private if missing; a warning names it once
    per job. `check` refuses to write below another user's."""
    folder = _fallback()
    try:
        os.mkdir(folder, 0o700)
    except OSError:  # it is there; or it cannot be made, which the writer will say
        pass
    try:
        check_private(folder)
    except OSError:
        return folder
    _warn(folder)
    return folder


def check(path: str) -> None:
    """Raise PermissionError if ``path`` is in a `fallback` that is not `check_private`."""
    folder = _fallback()
    if path.startswith(folder + os.sep):
        check_private(folder)


def check_private(folder: str, forbidden: int = 0o077) -> None:
    """Raise PermissionError unless ``folder`` is a directory of this user, no link, without ``forbidden`` bits of mode.

    By default others may not even read it; 0o022 forbids them to write."""
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & forbidden:
        return
    raise PermissionError(
        f"{folder} is not a private directory of this user (mode 0700, no link): chmod 700 it, or name another; "
        "XDG_CACHE_HOME names one for the cache"
    )


def _fallback() -> str:
    candidates = [os.environ.get(name, "") for name in _TEMPORARY] + ["/tmp", "/var/tmp"]
    usable = (one for one in candidates if os.path.isdir(one) and os.access(one, os.W_OK | os.X_OK))
    return os.path.join(os.path.abspath(next(usable, "/tmp")), f"flashpatch-{os.geteuid()}")


def is_writable(folder: str) -> bool:
    """Whether this user may write to a directory, or make it."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK | os.X_OK)


def _warn(folder: str) -> None:
    global _warned
    if _warned or _inherited:
        return
    _warned = True
    import logging

    logging.getLogger("flashpatch").warning(
        "flashpatch: there is no home directory that uid %s may write to: files for the user's cache are kept in "
        "%s. Set XDG_CACHE_HOME to keep them elsewhere.",
        os.geteuid(),
        folder,
    )
