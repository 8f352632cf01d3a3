"""Update the weights of a running, quantized vLLM engine: stock, and with FlashPatch.

    python examples/demo.py [--quantization SCHEME] [--page FILE]

Four engines on tiny random models, each in a process of its own: for stock vLLM and for vLLM with FlashPatch, one
opened on the new policy, whose answers are the reference, and one opened on the old policy and sent the new one
through four entry points. vLLM is imported once; the processes are forked from that one, as many at a time as there
are cores. About half a minute on two quiet cores; nothing is downloaded. In the end a page shows what the processes with
FlashPatch recorded, as ``flashpatch report`` makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import answers, vllm_engine
from flashpatch.verify.probes.fp8 import tiny

ENTRY_POINTS = (
    "reload_weights, whole",
    "reload_weights, halves",
    "load_weights, whole",
    "load_weights, 5 buckets",
)

#: Id of the run to which the processes report.
RUN = "demo"

#: What each process does; those that take longest come first.
ENGINES = {
    "stock-updated": "stock vLLM on A, sent B",
    "patched-updated": "vLLM with FlashPatch on A, sent B",
    "stock-fresh": "a fresh engine on B, stock vLLM",
    "patched-fresh": "a fresh engine on B, with FlashPatch",
}


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quantization", default="fp8_per_channel", help="vLLM's name of an online scheme")
    parser.add_argument("--page", type=Path, default=Path(".demo/job.html"), help="where to write the page")
    options = parser.parse_args()
    _compare(options.quantization, options.page)


def _compare(quantization: str, page: Path) -> None:
    """Run the engines, print what each update led to, and exit 1 if one with FlashPatch was wrong."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    began = time.monotonic()
    ledger = page.parent / "ledger"
    shutil.rmtree(ledger, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="flashpatch-demo-") as directory:
        home = Path(directory)
        console.print("two tiny random policies, A (old) and B (new); importing vLLM")
        with _unseen(home / "import.log"):
            tiny.write(home / "A", seed=0)
            tiny.write(home / "B", seed=1)
            _prepare(ledger)
        for number, (engine, seconds) in enumerate(_run(home, quantization), start=1):
            console.print(f"[{number}/{len(ENGINES)}] {ENGINES[engine]}: {seconds:.0f} s", markup=False)
        outcomes = {kind: _outcomes(home, kind) for kind in ("stock", "patched")}
        table = Table("update through", "stock vLLM", "with FlashPatch", title=f"A to B under {quantization}")
        for name, stock, patched in zip(ENTRY_POINTS, *outcomes.values(), strict=True):
            table.add_row(name, stock, patched)
        console.print(table)
        wrong = {
            kind: [text for text in told if not text.startswith(("exact", "refused"))]
            for kind, told in outcomes.items()
        }
        for kind, name in (("stock", "stock vLLM"), ("patched", "FlashPatch")):
            console.print(
                f"{name}: {len(wrong[kind])} of {len(ENTRY_POINTS)} updates failed or were silently wrong"
            )
        proven = _prove(ledger, page)
    scripts = os.path.relpath(Path(sys.executable).parent)
    console.print(
        f"what the engines with FlashPatch did: {page} ({time.monotonic() - began:.0f} s in all)",
        soft_wrap=True,
    )
    console.print(
        f"the same in a terminal: {scripts}/flashpatch-verify --live {ledger}\n"
        f"next: FLASHPATCH=fp8 {scripts}/python YOUR_SCRIPT.py; docs/tutorial/first-update.md",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    if wrong["patched"] or not proven:
        sys.exit("an update with FlashPatch was neither exact nor refused, or not proven")


@contextlib.contextmanager
def _unseen(log: Path) -> Iterator[None]:
    """Send what frameworks print while they are imported to a file."""
    with log.open("wb") as file:
        out, err = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(out, 1)
            os.dup2(err, 2)


def _prepare(ledger: Path) -> None:
    """Import vLLM with the environment of a tiny engine, for the processes to be forked with it."""
    for name in [name for name in os.environ if name.startswith("FLASHPATCH")]:
        del os.environ[name]
    os.environ |= vllm_engine.ENVIRONMENT | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    os.environ |= {"FLASHPATCH_LEDGER": str(ledger.resolve()), "FLASHPATCH_RUN": RUN}
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # elsewhere it would put placeholders in the place of CUDA's streams
        import vllm.v1.worker.cpu_worker  # noqa: F401
    vllm_engine.register_model()


def _run(home: Path, quantization: str) -> Iterator[tuple[str, float]]:
    """Run all engines, as many at a time as there are cores; yield each that ended, with its seconds."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(ENGINES), {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                engine = waiting.pop(0)
                process = fork.Process(target=_engine, args=(engine, home, quantization))
                process.start()
                running[process.sentinel] = engine, process, time.monotonic()
            for sentinel in connection.wait(list(running)):
                engine, process, began = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    sys.exit(f"{ENGINES[engine]} failed:\n{(home / f'{engine}.log').read_text()}")
                yield engine, time.monotonic() - began
    finally:
        for _, process, _ in running.values():
            process.kill()


def _engine(name: str, home: Path, quantization: str) -> None:
    """Be one engine: save its answers as ``NAME.npy`` or, after each update, ``NAME-NUMBER.npy``."""
    with (home / f"{name}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from flashpatch import ledger

    try:
        _answer(name, home, quantization)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    ledger.ending()
    os._exit(0)  # vLLM's shutdown takes seconds


def _answer(name: str, home: Path, quantization: str) -> None:
    import numpy

    import flashpatch

    kind, _, role = name.partition("-")
    if kind == "patched":
        flashpatch.enable("fp8", scheme=quantization)
    from vllm import LLM

    keywords = {} if kind == "patched" else {"quantization": quantization}
    llm = LLM(**vllm_engine.arguments(home / ("B" if role == "fresh" else "A"), **keywords))
    if role == "fresh":
        numpy.save(home / f"{name}.npy", vllm_engine.answers(llm, answers.PROMPTS[:1]))
        return
    errors = {}
    for number, update in enumerate(_updates(llm, home / "B")):
        error = _error(update)
        if error:
            errors[number] = error
        else:
            numpy.save(home / f"{name}-{number}.npy", vllm_engine.answers(llm, answers.PROMPTS[:1]))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(home / "A")})
    (home / f"{name}.json").write_text(json.dumps(errors))


def _updates(llm: Any, new: Path) -> Iterator[Callable[[], None]]:
    """Updates to the checkpoint ``new``, in the order of `ENTRY_POINTS`."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    weights = list(load_file(new / "model.safetensors").items())
    half = len(weights) // 2
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def reload(*parts: list) -> None:
        for part in parts:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(part)})

    def buckets() -> None:
        for start in range(5):
            runner.model.load_weights(iter(weights[start::5]))
        with set_current_vllm_config(runner.vllm_config):
            process_weights_after_loading(runner.model, runner.model_config, runner.device)

    yield lambda: reload(weights)
    yield lambda: reload(weights[:half], weights[half:])
    yield lambda: runner.model.load_weights(iter(weights))
    yield buckets


def _error(update: Callable[[], None]) -> str:
    """Update; return how it was refused or failed, empty if it returned."""
    from flashpatch import PatchError

    try:
        update()
    except PatchError as error:
        return f"refused: {error.problem.partition(':')[0].removeprefix('the update is ')}"
    except Exception as error:
        return f"fails: {type(error).__name__} {str(error)[:40]}".rstrip()
    return ""


def _prove(ledger: Path, page: Path) -> bool:
    """Print what the processes with FlashPatch recorded, write it as a page; return whether it proves `fp8`."""
    from flashpatch.cli import main as flashpatch
    from flashpatch.verify.cli import main as verify

    page.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(None):
        flashpatch(["report", RUN, "--ledger", str(ledger), "-o", str(page)])
    return verify(["fp8", "--live", str(ledger), "--run", RUN]) == 0


def _outcomes(home: Path, kind: str) -> list[str]:
    """What each update led to, against the fresh engine of the same kind."""
    errors = json.loads((home / f"{kind}-updated.json").read_text())
    return [
        errors.get(str(number)) or _difference(home, f"{kind}-updated-{number}", f"{kind}-fresh")
        for number in range(len(ENTRY_POINTS))
    ]


def _difference(home: Path, name: str, reference: str) -> str:
    """Compare saved answers, logprobs [1, positions], with those of the reference."""
    import numpy

    given, wanted = (numpy.load(home / f"{one}.npy") for one in (name, reference))
    if numpy.isnan(given).sum() > numpy.isnan(wanted).sum():
        return "silently wrong: NaN"
    worst = float(numpy.nanmax(numpy.abs(given - wanted)))
    return "exact" if worst == 0 else f"silently off by {worst:.1f}"


if __name__ == "__main__":
    main()
