"""Import modules once, then fork a process for each request: the server of `warm`, never run by hand.

Arguments: the listening socket's descriptor, then the modules. A request is one line of JSON with the arguments, environment
and directory of a Python process, and the descriptors to give it. The answer is the process id, and when it has ended, its
status. FlashPatch is not imported here: in the child its start-up file runs as it does in a new interpreter."""

import atexit
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import ray_start


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # a fifth of an import's time
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            pass  # another version of the framework does without it
    if "ray" in sys.modules:
        ray_start.ask_again()
    strangers = [name for name in sys.modules if name.partition(".")[0] == "flashpatch"]
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    # pyarrow's jemalloc stops its own thread in a fork; vLLM 0.24 imports pandas, which imports pyarrow
    if strangers or len([name for name in threads if name != "jemalloc_bg_thd"]) > 1:
        sys.exit(f"not to be forked: threads {threads}, {strangers[:3]}")
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # a child has its own
    gc.collect()
    gc.freeze()
    gc.enable()
    serve(listener)


def serve(listener: socket.socket) -> None:
    """Answer requests until nobody holds the other end of the input."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, wake, 0], [], [])[0]
        if 0 in ready and is_over():
            return
        if wake in ready:
            os.read(wake, 1024)
            report(running)
        if listener in ready:
            connection, _ = listener.accept()
            text, given, _, _ = socket.recv_fds(connection, 1 << 20, 16)
            while not text.endswith(b"\n"):
                text += connection.recv(1 << 20)
            request = json.loads(text)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake, woken, *[other.fileno() for other in running.values()]):
                    os.close(descriptor)
                listener.close()
                connection.close()
                become(request, given)
            for descriptor in given:
                os.close(descriptor)
            running[pid] = connection
            tell(connection, pid)


def is_over() -> bool:
    """Whether nobody has taken hold again; from then on nobody can."""
    with open("lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not select.select([0], [], [], 0)[0]:
            return False
        os.unlink("held")
        return True


def report(running: dict[int, socket.socket]) -> None:
    """Send the status of each child that has ended. It stays a zombie, so that its number, with which `warm.Process`
    kills its group, becomes nobody else's."""
    for pid in list(running):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            continue
        connection = running.pop(pid)
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        tell(connection, status)
        connection.close()


def tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except BrokenPipeError:
        pass  # who asked has ended


def become(request: dict[str, Any], given: list[int]) -> None:
    """Run the request in this process, and end it as an interpreter ends."""
    os.setsid()
    # Above all numbers that may be asked for, then each to its own.
    high = [os.dup2(descriptor, 200 + index) for index, descriptor in enumerate(given)]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(high, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable()
    status = 1
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        run(request["arguments"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run(arguments: list[str]) -> None:
    """Do what ``python *arguments`` does: ``-c code``, ``-m module`` or a script, with its own arguments."""
    below = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = arguments[0], arguments[1:]
    first = {"-c": "", "-m": os.getcwd()}.get(kind) if kind.startswith("-") else os.path.dirname(kind)
    sys.path[:0] = [first, *below]
    importlib.invalidate_caches()
    start_up()
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        module.__builtins__ = __builtins__
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def start_up() -> None:
    """Run FlashPatch's start-up file, which ran in this process without its variable."""
    try:
        files = distribution("flashpatch").files or []
    except PackageNotFoundError:
        return
    for file in files:
        if file.name == "flashpatch.pth":
            exec(file.locate().read_text())


if __name__ == "__main__":
    main()
