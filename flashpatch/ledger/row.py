"""Write this process's row in the ledger: its roles, and the state and call count of its patches.

The row is written at `boot`, in a forked child at its first role, note, event or call; at a patch's first call, and from
then on at most once a second, in the writer's thread alone, so a step waits for nothing, an idle process loses nothing, and engines that die by
SIGKILL lose at most the last second; after an event, a tenth of one. No failure to write reaches the caller: it is logged once and kept in
`problem`. Everything here may be called from any thread and, by the engine, under the engine's own lock."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flashpatch.arming import standby
from flashpatch.ledger import events, files, nodes
from flashpatch.ledger.writer import writer

if TYPE_CHECKING:
    from flashpatch.ledger.runs import Run

_INTERVAL = 1.0
_BEHIND = 0.1  # seconds by which the row may be older than the last event
_FLUSH_SECONDS = 2.0
_TELLS = frozenset({"driver", "engine-core"})
_log = logging.getLogger("flashpatch")


class _Row:
    """State of one process. ``_facts`` guards the fields and is never held while other code is called;
    ``_writing`` is only ever tried, so that the engine may hold its own lock while it calls in here."""

    def __init__(self) -> None:
        self._facts = threading.RLock()
        self._writing = threading.Lock()
        self._due = float("inf")  # when the writer calls `_on_time`
        self._dirty = self._begins = False
        self._last = 0.0
        self._exit_is_watched = False
        self.roles: set[str] = set()
        self.rank: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self.ended = ""
        self.booted = False
        self.problem: str | None = None

    def boot(self) -> None:
        with self._facts:
            given = getattr(sys, "argv", None) or sys.orig_argv[1:]  # in a .pth file there is no argv yet
            if self.booted or files.is_own_command("".join(given[:1])):
                return
            self.booted = True
            self._dirty = True
        self._write()

    def update(self, roles: Iterable[str], rank: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        with self._facts:
            before = (len(self.roles), dict(self.rank), dict(self.notes))
            self.roles.update(roles)
            self.rank.update(_as_json(rank))
            self.notes.update(_as_json(notes))
            changed = before != (len(self.roles), self.rank, self.notes)
        if changed:
            self.touch()

    def touch(self, now: bool = False, within: float = _INTERVAL) -> None:
        if not self.booted:
            return
        self._dirty = True
        due = 0.0 if now else self._last + within
        if self._due <= due:
            return
        self.watch_exit()
        if now or not self._last or not self._write_later(due):
            self._write()

    def stops(self, process: str, how: str) -> None:
        with self._facts:
            self.notes["stopped"] = {**self.notes.get("stopped", {}), process: how}
        self.touch()

    def flush(self) -> None:
        is_due = self._dirty or self._last  # not in a forked child in which nothing happened
        if self.booted and is_due and self._writing.acquire(timeout=_FLUSH_SECONDS):
            self._hand_over()

    def watch_exit(self) -> None:
        """Flush at exit. A child forked by multiprocessing skips atexit and clears finalizers after the
        fork, hence the call from the child's first change rather than from the fork."""
        if self._exit_is_watched:
            return
        self._exit_is_watched = True
        atexit.register(ending)
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:
            multiprocessing_util.Finalize(None, ending, exitpriority=-100)

    def _write_later(self, due: float) -> bool:
        self._due = due
        if writer.later(due, self._on_time):
            return True
        self._due = float("inf")
        return False

    def _on_time(self) -> None:
        self._due = float("inf")
        try:
            self._write()
        except Exception as error:
            self._tell(error)

    def _write(self) -> None:
        """Write what is dirty, unless another thread is at it: that thread looks again when it is done."""
        while self._dirty and self._writing.acquire(blocking=False):
            if not self._hand_over():
                return

    def _hand_over(self) -> bool:
        """Let the writer write the row, and return whether it will: it gives ``_writing`` back, which this thread holds."""
        self._dirty, self._last, taken = False, time.monotonic(), False
        try:
            value = self._content()
            taken = writer.do(lambda: self._store(value))
        finally:
            if not taken:
                self._dirty = True
                self._writing.release()
        if self._begins:
            self._begins = False
            from flashpatch.ledger import old_runs

            writer.do(old_runs.prune_ledger, wait=False)
        return taken

    def _store(self, value: dict[str, Any]) -> None:
        try:
            self._begins = files.write_row(value)
        except Exception as error:
            self._tell(error)
        else:
            self.problem = None
        finally:
            self._writing.release()
        if self._dirty:  # who handed it over may have given up waiting
            self._write_later(time.monotonic() + _INTERVAL)

    def _tell(self, error: Exception) -> None:
        if self.problem is None:
            _log.warning("flashpatch: the ledger row of this process cannot be written: %s", error)
        self.problem = str(error)

    def _content(self) -> dict[str, Any]:
        engine = _engine_snapshot()
        with self._facts:
            return files.row(engine, tuple(self.roles), self.rank, self.notes, self.ended)


_row = _Row()


def boot() -> None:
    """Write this process's first row; later calls do nothing."""
    _row.boot()
    _row.watch_exit()
    if sys.exit is _sys_exit:
        sys.exit, os._exit, os.kill = _exit, _exit_now, _kill
    nodes.watch()


def role(name: str, **rank: Any) -> None:
    """Add a role (driver, engine-core, worker, trainer) and ranks such as ``tp=1``; roles are a set.

    The first driver or engine core of a process says in its log what is on, and where the proof will be."""
    standby.wake()
    tells = name in _TELLS and _TELLS.isdisjoint(_row.roles)
    _row.update((name,), rank, {})
    now = _engine_snapshot().get("on", {}) if tells else {}
    if on := {family: one for family, one in now.items() if "off" not in one}:
        from flashpatch.settings import child_env

        told = ", ".join(sorted(map(files.name_and_options, on, on.values())))
        if os.environ.get("FLASHPATCH") == "1" and told == "fp8":
            told = "fp8, which quantizes rollouts (bf16 would not),"
        proof = f"flashpatch-verify --live --run {files.run_id()}"
        said = f"flashpatch: {told} on in this {name} (pid {os.getpid()}); proof: {proof}"
        print(said, *child_env.unknown(), sep="\nflashpatch: ", file=sys.stderr, flush=True)


def note(**values: Any) -> None:
    """Set free facts, JSON values; ``updates`` and ``steps`` count what makes evidence due."""
    standby.wake()
    _row.update((), {}, values)


def notes() -> dict[str, Any]:
    """Return a copy of this process's notes."""
    with _row._facts:
        return dict(_row.notes)


def event(name: str, /, **facts: Any) -> None:
    """Record that something happened now; see `flashpatch.ledger.events`. ``facts`` are JSON values."""
    _record(name, facts)


def sample(name: str, /, **facts: Any) -> None:
    """Record values that are measured over and over; when the file is full, every second sample is dropped."""
    _record(name, facts, sample=True)


def _record(name: str, facts: dict[str, Any], sample: bool = False) -> None:
    standby.wake()
    if _row.booted:
        events.log.append(name, facts, sample)
        if not sample:
            _row.touch(within=_BEHIND)  # else a kill leaves counts behind what the events say


def expect(
    pid: int, roles: Iterable[str] = (), families: Iterable[str] = (), host: str | None = None
) -> None:
    """Write the row that process ``pid`` is expected to write: a process that never got our environment
    writes nothing itself. ``host`` when it runs on another one."""
    standby.wake()
    if not _row.booted:
        return
    at = host or files.host()
    start = (files.process_start(pid) or "") if at == files.host() else ""
    value = {
        "kind": "expect",
        "run": files.run_id(),
        "host": at,
        "pid": pid,
        "start": start,
        "roles": sorted(roles),
        "families": sorted(families),
        "by": os.getpid(),
    }
    try:
        folder = os.path.dirname(files.row_path())
        files.write(os.path.join(folder, files.file_name("expect", at, pid, start)), value)
    except OSError as error:
        _log.warning("flashpatch: the expected row of process %s cannot be written: %s", pid, error)


def opens_engine(id: str = "") -> None:
    """Name the engine that this process opens now, by ``id`` where its nodes share one: what it starts belongs to it, on any host."""
    os.environ["FLASHPATCH_ENGINE"] = files.plain(id) or os.urandom(4).hex()


def touch(now: bool = False) -> None:
    """Mark the row as changed. ``now`` writes at once, for a patch's first call."""
    _row.touch(now)


def flush() -> None:
    """Write the row now."""
    _row.flush()


def problem() -> str | None:
    """Return why the last write failed, or None."""
    return _row.problem


def read(directory: str | os.PathLike[str] | None = None) -> list[Run]:
    """Read all runs of a ledger (default: this user's); see `flashpatch.ledger.runs.read`."""
    from flashpatch.ledger.runs import read as read_runs

    return read_runs(Path(directory) if directory is not None else files.directory())


_sys_exit, _os_exit, _os_kill = sys.exit, os._exit, os.kill


class _Noted:
    """What ``sys.exit`` was given. If nothing catches the exit the interpreter itself frees it, below no function; `why` is then noted."""

    why = ""

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            _row.ended = self.why


class _Status(_Noted, int):
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


class _Message(_Noted, str):
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (str(self),)


@functools.wraps(_sys_exit)  # it is pickled as what it stands for
def _exit(status: Any = None, /) -> NoReturn:
    if status and isinstance(status, int | str):
        noted = _Status(status) if isinstance(status, int) else _Message(status)
        noted.why, status = _said(sys.exc_info()[1]) or f"status {status}", noted
        del noted
    _sys_exit(status)


def _exit_now(status: int) -> NoReturn:
    """Write the row before a process ends without a way back, as one that multiprocessing forked, after it said how."""
    try:
        if status and _row.ended in ("", "returned"):
            _row.ended = _said(sys.exc_info()[1]) or f"status {status}"
        _row.ended = _row.ended or "returned"
        flush()
    finally:
        _os_exit(status)


def _kill(pid: int, number: int, /) -> None:
    """Note which other process of the run is ended from here, and how: a process that is killed says nothing itself."""
    if number in (signal.SIGTERM, signal.SIGKILL) and pid != os.getpid():
        start = files.process_start(pid) or ""
        name = files.file_name("row", files.host(), pid, start)
        if os.path.exists(os.path.join(os.path.dirname(files.row_path()), name)):
            _row.stops(f"{pid} {start}", f"{signal.Signals(number).name} from {os.getpid()}")
    _os_kill(pid, number)


def ending() -> None:
    """Write the row with how this process ends."""
    error, last = sys.exc_info()[1], getattr(sys, "last_value", None)
    trace = getattr(last, "__traceback__", None)  # none of a script that cannot be read
    if (trace is None or trace.tb_frame.f_back is None) and not hasattr(sys, "ps1"):  # not one of a prompt
        error = error or last
    _row.ended = _said(error) or _row.ended or "returned"
    flush()


def _said(error: BaseException | None) -> str:
    """Return an exception as the end of a process; empty for none, and for an exit with status 0."""
    if isinstance(error, SystemExit):
        return f"status {error.code}" if error.code else ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] if error is not None else ""


def _engine_snapshot() -> dict[str, Any]:
    engine = sys.modules.get("flashpatch.engine")
    if engine is None:
        return {}
    try:
        return engine.snapshot()
    except Exception as error:
        return {"error": f"this row is incomplete: {error!r}"}


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy, so that the row cannot change while it is written."""
    return json.loads(json.dumps(dict(values), default=repr))


def _after_fork() -> None:
    global _row
    was_booted = _row.booted
    _row = _Row()
    _row.booted = was_booted


os.register_at_fork(after_in_child=_after_fork)
