"""The command lines that a fork can serve.

They are those of Ray's workers, of the processes that ``multiprocessing`` spawns, and of the process in which vLLM
looks at a model's class.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

SPAWNED = "--multiprocessing-fork"
INSPECTION = "vllm.model_executor.models.registry"


@dataclass(frozen=True)
class Program:
    """What a command line runs.

    Attributes:
        argv: its ``sys.argv``.
        path: its ``sys.path[0]``.
        code: its main module, compiled.
        file: the main module's file, or None for ``-c``.
        adapt: changes the environment further, as what the command line starts first would.
    """

    argv: list[str]
    path: str
    code: CodeType
    file: str | None = None
    adapt: Callable[[], None] = field(default=lambda: None)

    def enter(self, environment: Mapping[bytes, bytes]) -> None:
        """Make ``environment`` this process's."""
        os.environ.clear()
        os.environb.update(environment)
        self.adapt()

    def run(self) -> None:
        """Run it as this process's main module."""
        main = ModuleType("__main__")
        main.__builtins__ = __builtins__
        main.__loader__ = None
        if self.file is not None:
            main.__file__ = self.file
            main.__cached__ = None
        sys.modules["__main__"] = main
        sys.argv[:] = self.argv
        if not sys.flags.safe_path:
            sys.path.insert(0, self.path)
        exec(self.code, vars(main))


def program(command: list[str]) -> Program | None:
    """What a fork would run for this command line, or None where only a new interpreter can."""
    return _spawned(command) or _inspection(command) or _ray_worker(command)


def _spawned(command: list[str]) -> Program | None:
    flags = subprocess._args_from_interpreter_flags()
    if command[1:-2] != [*flags, "-c"] or command[-1] != SPAWNED:
        return None
    return Program(argv=["-c", SPAWNED], path="", code=compile(command[-2], "<string>", "exec"))


def _inspection(command: list[str]) -> Program | None:
    registry = sys.modules.get(INSPECTION)
    if registry is None or command[1:] != ["-m", INSPECTION]:
        return None
    code = f"import runpy; runpy.run_module({INSPECTION!r}, run_name='__main__', alter_sys=True)"
    return Program(argv=[registry.__file__], path="", code=compile(code, "<string>", "exec"))


_compiled: dict[str, CodeType] = {}


def _ray_worker(command: list[str]) -> Program | None:
    """Do what ``setup_worker.py`` does before it executes ``default_worker.py``, when it would do no more."""
    if len(command) < 3 or "ray._private.workers.setup_worker" not in sys.modules:
        return None
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    if os.path.realpath(command[1]) != os.path.realpath(setup_worker.__file__):
        return None
    given, rest = setup_worker.parser.parse_known_args(command[2:])
    context = RuntimeEnvContext.deserialize(given.serialized_runtime_env_context or "{}")
    plain = RuntimeEnvContext(env_vars=context.env_vars)
    if given.language != "PYTHON" or vars(context) != vars(plain) or not rest or not os.path.isfile(rest[0]):
        return None

    def adapt() -> None:
        from ray._private import utils

        utils.update_envs(context.env_vars)

    if rest[0] not in _compiled:
        with open(rest[0], encoding="utf-8") as file:
            _compiled[rest[0]] = compile(file.read(), rest[0], "exec")
    return Program(rest, os.path.dirname(os.path.abspath(rest[0])), _compiled[rest[0]], rest[0], adapt)


def fresh(executable: str) -> None:
    """Renew in a forked child what an interpreter draws or counts at its start.

    Args:
        executable: what ``multiprocessing`` and vLLM are to start their processes with.
    """
    import multiprocessing

    multiprocessing.set_executable(executable)
    multiprocessing.current_process().authkey = os.urandom(32)
    registry = sys.modules.get(INSPECTION)
    inspection = getattr(registry, "_SUBPROCESS_COMMAND", None)
    if inspection and inspection[0] == sys.executable:
        inspection[0] = executable
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def threads(imported_with: Mapping[bytes, bytes]) -> None:
    """Obey variables about threads that torch and its libraries read when they were loaded.

    Args:
        imported_with: the environment then.
    """
    torch, utils = sys.modules.get("torch"), sys.modules.get("ray._private.utils")
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.cpp.dynamic_threads = os.environ.get("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "0") == "1"
    if torch is None:
        return

    def follow() -> None:
        wanted, logical = os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
        number = int(wanted) if wanted.isdecimal() else logical
        # torch asks MKL at its start, which allows one thread per core at most
        torch.set_num_threads(min(number, _cores()) if torch.backends.mkl.is_available() else number)

    if os.environb.get(b"OMP_NUM_THREADS") != imported_with.get(b"OMP_NUM_THREADS"):
        follow()
    if utils is None:
        return
    stock: Any = utils.set_omp_num_threads_if_unset

    def set_omp_num_threads_if_unset() -> bool:
        was_set = stock()
        if was_set:
            follow()
        return was_set

    utils.set_omp_num_threads_if_unset = set_omp_num_threads_if_unset


def _cores() -> int:
    """Cores that this process may use; threads of one core count once."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
