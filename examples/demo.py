"""Update the weights of a running, quantized vLLM engine: stock, and with FlashPatch.

    python examples/demo.py [--quantization SCHEME]

Three engines on tiny random models, each in a process of its own: one opened on the new policy (what the
answers should be), a stock one on the old policy that is sent the new one through four doors, and the same
with FlashPatch. A few minutes on two cores; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.fp8 import tiny

DOORS = (
    "reload_weights, the whole model",
    "reload_weights, half the model at a time",
    "load_weights, the whole model",
    "load_weights, 5 buckets, then post-processing",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quantization", default="fp8_per_channel", help="vLLM's name of an online scheme")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "DIR"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        _side(asked.side[0], Path(asked.side[1]), asked.quantization)
    else:
        _compare(asked.quantization)


def _compare(quantization: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flashpatch-demo-") as directory:
        home = Path(directory)
        console.print("two tiny random policies, A (old) and B (new)")
        tiny.write(home / "A", seed=0)
        tiny.write(home / "B", seed=1)
        for number, (side, what) in enumerate(
            (
                ("fresh", "a fresh engine on B: what the answers should be"),
                ("stock", "stock vLLM on A, sent B"),
                ("patched", "vLLM with FlashPatch on A, sent B"),
            ),
            start=1,
        ):
            with console.status(f"[{number}/3] {what}"):
                spent = _run(side, home, quantization)
            console.print(f"[{number}/3] {what}: {spent:.0f} s", markup=False)
        table = Table("update through", "stock vLLM", "with FlashPatch", title=f"A to B under {quantization}")
        stock, patched = (json.loads((home / f"{side}.json").read_text()) for side in ("stock", "patched"))
        for door in DOORS:
            table.add_row(door, stock["doors"][door], patched["doors"][door])
        console.print(table)
        console.print(patched["status"], markup=False, highlight=False)
    console.print(f"done in {time.monotonic() - began:.0f} s")
    if not patched["sound"]:
        sys.exit("an update with FlashPatch was neither exact nor refused")


def _run(side: str, home: Path, quantization: str) -> float:
    """Run one side in its own process; the seconds it took."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    environment |= tiny.ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["FLASHPATCH_LEDGER"] = str(home / "ledger")
    command = [sys.executable, __file__, "--side", side, str(home), "--quantization", quantization]
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"the side {side!r} failed:\n{done.stdout}")
    return time.monotonic() - began


def _side(side: str, home: Path, quantization: str) -> None:
    import numpy

    import flashpatch

    if side == "patched":
        flashpatch.enable("fp8", scheme=quantization)
    from vllm import LLM

    asked = {} if side == "patched" else {"quantization": quantization}
    llm = LLM(**tiny.engine_arguments(str(home / ("B" if side == "fresh" else "A")), **asked))
    if side == "fresh":
        numpy.save(home / "fresh.npy", tiny.answers(llm))
        return
    wanted = numpy.load(home / "fresh.npy")
    doors = {}
    for door, update in zip(DOORS, _updates(llm, home / "B"), strict=True):
        doors[door] = _outcome(llm, update, wanted)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(home / "A")})
    sound = side != "patched" or all(text.startswith(("exact", "refused")) for text in doors.values())
    enabled = [line for line in str(flashpatch.status()).splitlines() if "  disabled" not in line]
    report = {"doors": doors, "sound": sound, "status": "\n".join(enabled)}
    (home / f"{side}.json").write_text(json.dumps(report))


def _updates(llm: Any, new: Path) -> Iterator[Callable[[], None]]:
    """The doors, in the order of `DOORS`."""
    import torch
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
            process_weights_after_loading(runner.model, runner.model_config, torch.device("cpu"))

    yield lambda: reload(weights)
    yield lambda: reload(weights[:half], weights[half:])
    yield lambda: runner.model.load_weights(iter(weights))
    yield buckets


def _outcome(llm: Any, update: Callable[[], None], wanted: Any) -> str:
    """What came of one update, in a few words."""
    import numpy

    from flashpatch import PatchError

    try:
        update()
    except PatchError as error:
        return f"refused: {error.problem[:90]}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:60]}"
    given = tiny.answers(llm)
    if numpy.isnan(given).sum() > numpy.isnan(wanted).sum():
        return "silently wrong: NaN"
    worst = float(numpy.nanmax(numpy.abs(given - wanted)))
    return (
        "exact: every logprob equal" if worst == 0 else f"silently wrong: logprobs off by up to {worst:.1f}"
    )


if __name__ == "__main__":
    main()
