"""Run a function of a test file in an interpreter of its own, with the environment of your choice.

def update(model): ...          # module-level in the test file; arguments and result are JSON data
result = scenario.run(update, str(model), env={"FLASHPATCH": "bf16"})
with scenario.Runner(env={...}) as runner:   # one interpreter for several calls: vLLM is imported once
    runner(update, str(a)); runner(update, str(b))"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import inspect
import itertools
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import warm
from machine import limit

from vllm_lab import environment, imported

_PIPE = "FLASHPATCH_LAB_PIPE"
_RESULTS = 3  # the descriptor that results are written to
_numbers = itertools.count()


class ScenarioError(AssertionError):
    """The function raised, died or ran out of time; the message ends with all that its processes printed."""


class Runner:
    """One interpreter that runs functions in turn. Not thread-safe. `log` is the file of all it printed.

    It is forked from one that has imported vLLM."""

    def __init__(self, env: Mapping[str, str | None] | None = None, *, standin: bool = False) -> None:
        self._env, self._standin = dict(env or {}), standin
        self._process: warm.Process | None = None
        self._calls: IO[str] | None = None
        self._results = -1
        self.log = environment.store() / "logs" / f"{os.getpid()}-{next(_numbers)}.log"

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 600, **kw: Any) -> Any:
        """function(*args, **kw) over there; its result as JSON data. `timeout` in seconds, start included."""
        file = Path(inspect.getfile(function)).resolve()
        name = f"vllm_lab.{file.stem}" if file.parent == environment.HERE else file.stem
        call = dict(path=str(file.parent), module=name, function=function.__qualname__, args=args, kw=kw)
        call |= dict(timeout=limit(timeout))
        process = self._start(file.parent)
        printed = self.log.stat().st_size
        try:
            self._calls.write(json.dumps(call) + "\n")
            self._calls.flush()
            answer = self._answer(process, time.monotonic() + call["timeout"])
        except (BrokenPipeError, TimeoutError, EOFError) as error:
            self.close(timeout=0)
            raise ScenarioError(self._story(f"{type(error).__name__}: {error}", call, printed)) from None
        if "error" in answer:
            raise ScenarioError(self._story(answer["error"], call, printed))
        return answer["result"]

    def close(self, timeout: float = 60) -> None:
        """End the interpreter and whatever it left behind in its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            self._calls.close()
            process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # it is killed below
        process.kill()
        process.wait()
        os.close(self._results)

    def kill(self) -> None:
        """End the interpreter, from any thread; a call that waits for it raises."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, directory: Path) -> warm.Process:
        if self._process is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            calls, calling = os.pipe()
            self._results, results = os.pipe()
            env = environment.clean(
                paths=(directory,), standin=self._standin, **{_PIPE: str(_RESULTS), **self._env}
            )
            with self.log.open("ab") as log:
                early = environment.early_paths(self._env)
                self._process = warm.start(
                    (*warm.VLLM, *(warm.VLLM_V2 if early else ())),
                    ["-m", "vllm_lab.scenario"],
                    env=env,
                    path=early,
                    cwd=environment.store(),
                    descriptors={0: calls, 1: log.fileno(), 2: log.fileno(), _RESULTS: results},
                )
            os.close(calls)
            os.close(results)
            self._calls = os.fdopen(calling, "w")
        return self._process

    def _answer(self, process: warm.Process, deadline: float) -> dict[str, Any]:
        received = b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no result in time")
            if select.select([self._results], [], [], min(left, 1.0))[0]:
                part = os.read(self._results, 1 << 20)
                if not part:
                    raise EOFError(f"the interpreter ended with status {process.wait()}")
                received += part
            elif process.poll() is not None and not select.select([self._results], [], [], 0)[0]:
                raise EOFError(f"the interpreter ended with status {process.returncode}")
        answer: dict[str, Any] = json.loads(received)
        return answer

    def _story(self, what: str, call: Mapping[str, Any], printed: int) -> str:
        with self.log.open("rb") as log:
            log.seek(printed)
            text = log.read().decode(errors="replace")
        return (
            f"{call['module']}.{call['function']}: {what.rstrip()}\n--- printed by its processes ---\n{text}"
        )


def run(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    standin: bool = False,
    timeout: float = 600,
    **kw: Any,
) -> Any:
    """One call in an interpreter of its own."""
    with Runner(env, standin=standin) as runner:
        return runner(function, *args, timeout=timeout, **kw)


def _serve() -> None:
    imported.inspect_here()
    pipe = int(os.environ.pop(_PIPE))
    os.set_inheritable(pipe, False)
    with os.fdopen(pipe, "w") as results:
        for line in sys.stdin:
            call = json.loads(line)
            # Seconds: whoever waits must not be first on a busy machine.
            early = min(30.0, call["timeout"] / 2)
            faulthandler.dump_traceback_later(call["timeout"] - early)  # a hang shows where it hangs
            try:
                if call["path"] not in sys.path:
                    sys.path.insert(0, call["path"])
                function: Any = importlib.import_module(call["module"])
                for part in call["function"].split("."):
                    function = getattr(function, part)
                answer = json.dumps(
                    dict(result=function(*call["args"], **call["kw"])), default=dataclasses.asdict
                )
            except BaseException:  # SystemExit and KeyboardInterrupt too: the caller must hear of it
                answer = json.dumps(dict(error=traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.flush()
            results.write(answer + "\n")
            results.flush()


if __name__ == "__main__":
    _serve()
