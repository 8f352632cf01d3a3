"""Import what a job's processes import, then fork one for each launcher that asks.

    python server.py FOLDER PATH < PIPE

``FOLDER`` gets the socket; it holds the launcher's script, and is removed at the end. ``PATH`` is the
``sys.path`` of the job's driver, as JSON, since Ray's workers import from there too. The pipe brings one
line, the process id of the raylet and of Ray's job. Ray reads its configuration, with these two, when its
library is loaded, so that what imports Ray is imported only then. The server ends with the last of its
children once the raylet has ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its siblings are not top-level modules

from flashpatch import engine, ledger
from flashpatch.patches.cpu.warm import commands, launcher, request, variables

WITHOUT_RAY = (
    "torch",
    "transformers",
    "tensordict",
    "datasets",
    "torchdata.stateful_dataloader",
    "peft",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
)
WITH_RAY = (
    "ray._private.workers.setup_worker",
    "ray._private.workers.default_worker",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)
SOCKET, SCRIPT = "socket", "python"
NOTE = "flashpatch: cpu.ray.start_ray_process:"
PATIENCE = 5.0  # seconds for a thread of Python to end
FORK_SAFE_THREADS = frozenset(
    {"jemalloc_bg_thd"}
)  # jemalloc, inside pyarrow, stops and restarts it around a fork


class Server:
    """The loop that waits for launchers, children and the raylet."""

    def __init__(
        self, folder: Path, listener: socket.socket, raylet: int, imported_with: dict[bytes, bytes]
    ) -> None:
        self.script = str(folder / SCRIPT)
        self.imported_with = imported_with
        now = dict(os.environb)
        self.set_by_imports = {name: now[name] for name in now if now[name] != imported_with.get(name)}
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[int, socket.socket]] = {}  # pidfd to process id and launcher
        self.ending = False
        self.held = set(launcher.open_files()) - {0, 1, 2, listener.fileno(), raylet, self.selector.fileno()}
        self._watch(listener, lambda: self._accept(listener))
        self._watch(raylet, lambda: self._raylet_ended(raylet))

    def serve(self) -> Callable[[], None] | None:
        """Serve until the job ends; in a forked child, return what it is to run."""
        while self.children or not self.ending:
            for key, _ in self.selector.select():
                run = key.data()
                if run is not None:
                    return run
        return None

    def _watch(self, file: socket.socket | int, call: Callable[[], Callable[[], None] | None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, call)

    def _raylet_ended(self, raylet: int) -> None:
        """Take no more requests; Ray's workers end by themselves when their raylet has."""
        self.selector.unregister(raylet)
        self.ending = True

    def _accept(self, listener: socket.socket) -> Callable[[], None] | None:
        connection, _ = listener.accept()
        try:
            asked = request.receive(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        pid = None
        try:
            program = commands.program(asked.command) if request.can_take_over(asked, self.held) else None
            if program is not None and not self.ending and self._may_fork(asked, program):
                calls = {id: patch["calls"] for id, patch in engine.snapshot().get("patches", {}).items()}
                pid = os.fork()
                if pid == 0:
                    return self._become(asked, program, connection, calls)
        except (
            Exception
        ) as error:  # whatever is wrong with one request, the launcher can do without this process
            print(f"{NOTE} not forked: {error!r}", file=sys.stderr, flush=True)
        asked.close()
        if pid is None:
            _tell(connection, launcher.DECLINED)
            connection.close()
        else:
            self._watch_child(pid, connection)
        return None

    def _may_fork(self, asked: request.Request, program: commands.Program) -> bool:
        """Whether the imports would have gone the same way in the environment asked for; say so if not."""
        own = dict(os.environb)
        try:
            program.enter(asked.facts["environment"])
            found = variables.hindrances(os.environb, self.imported_with, self.set_by_imports)
        finally:
            os.environ.clear()
            os.environb.update(own)
        if found:
            print(f"{NOTE} not forked: {', '.join(found)} differ", file=sys.stderr, flush=True)
        return not found

    def _become(
        self,
        asked: request.Request,
        program: commands.Program,
        connection: socket.socket,
        calls: dict[str, int],
    ) -> Callable[[], None]:
        """In the child: answer, and take the launcher's place."""
        try:
            _tell(connection, launcher.FORKED + os.getpid().to_bytes(launcher.LENGTH, "big"))
            connection.close()
            self._release()
            program.enter(asked.facts["environment"])
            for name, value in self.set_by_imports.items():
                if os.environb.get(name) == self.imported_with.get(name):
                    os.environb[name] = value
            request.take_over(asked)
            sys.orig_argv[:] = asked.command
            _count(asked.facts["parent"], calls)
            commands.fresh(self.script)
            commands.threads(self.imported_with)
            gc.enable()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return program.run

    def _release(self) -> None:
        """In the child: close what belongs to the server."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd > 2:
                os.close(key.fd)
        self.selector.close()

    def _watch_child(self, pid: int, connection: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, connection)
        self._watch(pidfd, lambda: self._child_ended(pidfd))
        self._watch(connection, lambda: self._launcher_ended(pidfd))

    def _child_ended(self, pidfd: int) -> None:
        """Reap the child and let its launcher end the same way."""
        pid, connection = self.children.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if connection.fileno() >= 0:
            self.selector.unregister(connection)
            _tell(connection, os.waitstatus_to_exitcode(status).to_bytes(launcher.LENGTH, "big", signed=True))
            connection.close()

    def _launcher_ended(self, pidfd: int) -> None:
        """A launcher that is killed takes its child along: who kills it means the process it stands for."""
        pid, connection = self.children.get(pidfd, (0, None))
        if connection is not None:
            self.selector.unregister(connection)
            connection.close()
            os.kill(pid, signal.SIGKILL)


def load(names: Iterable[str]) -> None:
    """Import modules; what is missing here is missing in the workers, and they say so themselves."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{NOTE} not imported beforehand: {error}", file=sys.stderr, flush=True)


def settle() -> str | None:
    """Make forks cheap and safe.

    Returns:
        Why this process must not fork, or None.
    """
    gc.collect()
    gc.disable()
    gc.freeze()  # collections in children leave shared pages alone
    # libraries that mind forks, such as OpenBLAS, end their threads before the first one; without Python's hooks
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE)  # such as the ledger's, which writes within a second and ends
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {os.getpid()}
    names = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks}
    return f"imports left threads: {', '.join(sorted(names))}" if names - FORK_SAFE_THREADS else None


def main() -> None:
    """Import, listen, serve; in a forked child, run what the launcher asked for."""
    folder, path = Path(sys.argv[1]), list(sys.path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / SOCKET))
    listener.listen(64)
    imported_with = dict(os.environb)
    sys.path[:] = json.loads(sys.argv[2])
    load(WITHOUT_RAY)
    trouble = "their imports load Ray" if "ray._raylet" in sys.modules else None
    raylet, _, job = sys.stdin.readline().strip().partition(" ")
    if not raylet:  # ray.init has failed before it started one
        shutil.rmtree(folder, ignore_errors=True)
        return
    run = None
    started = {"RAY_RAYLET_PID": raylet, "RAY_JOB_ID": job}
    os.environ.update(started)
    imported_with |= {os.fsencode(name): os.fsencode(value) for name, value in started.items()}
    try:
        load(WITH_RAY)
        sys.path[:] = path
        trouble = trouble or settle()
        if trouble is None:
            run = Server(folder, listener, os.pidfd_open(int(raylet)), imported_with).serve()
    except Exception as error:
        trouble = repr(error)
    if trouble:
        print(f"{NOTE} no worker is forked: {trouble}", file=sys.stderr, flush=True)
    if run is None:
        _retire(folder, raylet)
    else:
        run()


def _retire(folder: Path, raylet: str) -> NoReturn:
    """Keep the folder until the raylet has ended, which runs the script in it, in a process without the imports."""
    ledger.flush()
    wait = (
        "import os, select, shutil, sys\n"
        "try: select.select([os.pidfd_open(int(sys.argv[1]))], [], [])\n"
        "except ProcessLookupError: pass\n"
        "shutil.rmtree(sys.argv[2], True)"
    )
    os.execv(sys.executable, [sys.executable, "-IS", "-c", wait, raylet, str(folder)])


def _count(parent: int, calls: dict[str, int]) -> None:
    """Write in the child's row who asked for it, and the calls of patches that its imports made."""
    ledger.started_by(parent)
    for patch_id, number in calls.items():
        for _ in range(number):
            engine.record_call(patch_id)


def _tell(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(message)
    except OSError:
        pass


if __name__ == "__main__":
    main()
