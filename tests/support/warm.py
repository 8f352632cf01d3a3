"""Start Python processes that have imported a framework already: most of a small engine's start is imports.

Per set of modules one server (`warm_server`) imports them, and forks a process for each request. In the child
FlashPatch finds the framework imported, as with a user's late ``flashpatch.enable``. Tests of what happens while a
framework is imported start a new interpreter instead.

Servers of one run of pytest end with it. Those in the folder that ``WARM_SERVERS`` names serve all runs beside each other,
such as the lanes of `make test`, and end with the last of them."""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import IO

#: What FlashPatch and its commands take from elsewhere: for processes without a framework.
PLAIN = (
    *"argparse ast csv dataclasses difflib email.message hashlib inspect json logging platform".split(),
    *"random shutil subprocess sysconfig tempfile textwrap tomllib traceback typing zipfile".split(),
    *"importlib.metadata importlib.resources packaging.requirements packaging.version".split(),
)
#: Modules worth importing once, by the framework a process is about. The server of `MODELS` serves for a part of them too.
VLLM = (
    *"vllm vllm.entrypoints.llm vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.cpu_worker".split(),
    "vllm.v1.worker.cpu_model_runner",
)
#: vLLM's CUDA wheel.
VLLM_CUDA = (
    *VLLM[:4],
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
)
#: Beside those, for engines with the second model runner.
VLLM_V2 = ("vllm.v1.worker.cpu.model_runner",)
TORCH = ("torch", "torch.distributed.fsdp")
MODELS = (*TORCH, "transformers", "safetensors.torch", "transformers.models.auto.modeling_auto")
#: verl itself is left out: it chooses its platform when it is imported; and datasets and pandas, which start a thread.
VERL = (*MODELS, "ray", "tensordict", "hydra", "peft", "fastapi")
#: Where verl imports vLLM too: another ten seconds.
VERL_VLLM = (*VERL, *VLLM, "vllm.entrypoints.openai.api_server")
#: And SGLang, whose stand-ins every process of its environment finds.
VERL_SGLANG = (*VERL, "sglang", "sglang.srt.entrypoints.http_server")

#: Variables that are read while a framework is imported: a server serves requests that agree in them. Ray reads its
#: own when it starts.
_EARLY = (
    *("CUDA_", "FAKE_CUDA_CAPABILITY", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "STANDIN_", "TOKENIZERS_"),
    *("TORCHDYNAMO_", "TORCH_", "TRANSFORMERS_", "TRITON_"),
    *("VLLM_CONFIGURE_", "VLLM_LOGGING_", "VLLM_TARGET_", "VLLM_USE_"),
)
_EARLY_WITH = {"sglang": ("SGLANG_",)}

_servers: dict[tuple[object, ...], Server] = {}
_starting = threading.Lock()
_temporary = tempfile.gettempdir()  # tests replace it for a time, and servers stay
_own = os.environ  # by this name also where a test has replaced os.environ
_at_first = dict(os.environ)


def remember() -> None:
    """Take this process's environment for the one that tests were started with.

    Libraries that tests import later add to it, as triton and cv2 do, and no server differs from another by that."""
    _at_first.clear()
    _at_first.update(_own)


def _given(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the variables that imports have set in this process as they were at first."""
    given = dict(env)
    for name, value in env.items():
        if name.startswith(_EARLY) and _own.get(name) == value != _at_first.get(name):
            del given[name]
            given |= {name: _at_first[name]} if name in _at_first else {}
    return given


class Process:
    """A process forked from a server: the part of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.args, self.returncode = list(arguments), None
        self._connection, self._answers = connection, connection.makefile()
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the server of warm interpreters has ended")
        self.pid = int(line)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        """End it and its process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Server:
    """One interpreter with modules imported, that forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self._own = None
        if shared := _at_first.get("WARM_SERVERS"):
            folder = Path(shared, name)
            folder.mkdir(mode=0o700, exist_ok=True)
        else:
            self._own = tempfile.TemporaryDirectory(prefix="warm-", dir=_temporary)
            folder = Path(self._own.name)
        self._address, self.log = str(folder / "socket"), folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:  # of a server that nobody holds there is no such file, and nobody reads it if it was killed
                self._held = os.open(folder / "held", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                self._begin(modules, environment, folder)
        self._owner = os.getpid()
        atexit.register(self.close)

    def _begin(self, modules: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        for old in ("held", "socket"):
            (folder / old).unlink(missing_ok=True)
        os.mkfifo(folder / "held")
        held = os.open(folder / "held", os.O_RDONLY | os.O_NONBLOCK)
        self._held = os.open(folder / "held", os.O_WRONLY)
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("wb") as log:
            listener.bind(self._address)
            listener.listen(64)
            script = Path(__file__).with_name("warm_server.py")
            self._process = subprocess.Popen(
                [sys.executable, script, str(listener.fileno()), *modules],
                env=environment,
                cwd=folder,
                stdin=held,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )
        os.close(held)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: str | os.PathLike[str],
        descriptors: Mapping[int, int],
    ) -> Process:
        """Fork a process; ``descriptors`` gives its descriptor for each number, 0 to 2 at least."""
        request = dict(
            arguments=list(map(str, arguments)),
            environment=dict(environment),
            directory=str(directory),
            descriptors=list(descriptors),
        )
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        line = dumps(request).encode() + b"\n"
        try:
            sent = socket.send_fds(connection, [line], list(descriptors.values()))
            connection.sendall(line[sent:])
            return Process(connection, request["arguments"])
        except (RuntimeError, ConnectionError):
            raise RuntimeError(self.log.read_text()) from None

    def close(self) -> None:
        """Let go of the server, which ends if nobody else holds it; its children go on."""
        if os.getpid() != self._owner:
            return
        os.close(self._held)
        if self._own is not None and self._process is not None:
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._own.cleanup()


def start(
    modules: Sequence[str],
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str],
    descriptors: Mapping[int, int],
    path: Sequence[str | os.PathLike[str]] = (),
) -> Process:
    """Fork ``python *arguments`` from a server with the modules imported in an environment like ``env``.

    Of directories on the path only those in ``path`` are on the server's too."""
    env = _given(env)
    base = {name: value for name, value in env.items() if not name.startswith(("FLASHPATCH", "PYTHONPATH"))}
    if path:
        base["PYTHONPATH"] = os.pathsep.join(map(str, path))
    prefixes = sum((_EARLY_WITH.get(module, ()) for module in modules), _EARLY)
    early = {name: value for name, value in base.items() if name.startswith(prefixes)}
    key = (os.getpid(), tuple(sorted(early.items())))
    fitting = [MODELS, modules] if {*modules} <= {*MODELS} else [modules]
    with _starting:
        server = next((_servers[*key, *one] for one in fitting if (*key, *one) in _servers), None)
        if server is None:
            name = sha256(repr((sys.executable, key[1:], tuple(modules))).encode()).hexdigest()[:16]
            server = _servers[*key, *modules] = Server(modules, base, name)
    return server.start(arguments, env, cwd, descriptors)


def run(
    modules: Sequence[str],
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str],
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` to its end and capture what it prints, as `subprocess.run` does."""
    [done] = run_together(modules, [(arguments, env)], cwd=cwd, timeout=timeout)
    return done


def run_together(
    modules: Sequence[str],
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    *,
    cwd: str | os.PathLike[str],
    timeout: float,
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python side by side, such as ranks that meet, each with arguments and environment; none is left running."""
    with ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull))
        outputs = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        running: list[Process] = []
        stack.callback(lambda: [process.kill() for process in running if process.returncode is None])
        for (arguments, env), (out, err) in zip(commands, outputs, strict=True):
            given = {0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()}
            running.append(start(modules, arguments, env=env, cwd=cwd, descriptors=given))
        end = time.monotonic() + timeout
        for process, files in zip(running, outputs, strict=True):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                time.sleep(0.1)
                raise subprocess.TimeoutExpired(process.args, timeout, *map(text, files)) from None
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *map(text, files))
            for process, files in zip(running, outputs, strict=True)
        ]


def popen(
    modules: Sequence[str], arguments: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str]
) -> Process:
    """Fork ``python *arguments`` with text pipes for what it reads and prints, as `subprocess.Popen` has them."""
    (read, stdin), (stdout, out), (stderr, err) = os.pipe(), os.pipe(), os.pipe()
    process = start(modules, arguments, env=env, cwd=cwd, descriptors={0: read, 1: out, 2: err})
    for descriptor in (read, out, err):
        os.close(descriptor)
    process.stdin, process.stdout, process.stderr = open(stdin, "w", 1), open(stdout), open(stderr)
    return process


def text(file: IO[bytes]) -> str:
    """Return all that was written to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")
