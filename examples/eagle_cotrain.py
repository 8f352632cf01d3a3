"""A policy that drifts, and a drafter that keeps up with it or does not, on a stock vLLM.

    python examples/eagle_cotrain.py [DIRECTORY] [--quick]

1. A Llama of a million weights is taught a made-up language, and goes on being taught while the language drifts:
   one policy per round (`eagle/policies.py`, `eagle/language.py`).
2. An engine goes through the rounds with a drafter from scratch: the family captures hidden states during the
   rollouts, a trainer in another process learns from them in the pauses, and its weights go into the running
   engine. A second engine goes through the same rounds with the drafter as it was at their beginning
   (`eagle/rollouts.py`).
3. Acceptance, arms chosen by the bandit, and tokens per second are drawn (`eagle/plot.py`).

``--quick`` does the same in a smaller way; nothing is downloaded. DIRECTORY, ``.demo/eagle`` if none is given,
gets the pictures (with ``flashpatch[plot]``) and their numbers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent / "eagle"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(".demo/eagle"))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter lessons")
    parser.add_argument("--plot-only", action="store_true", help="draw again what is in the directory")
    chosen = parser.parse_args()
    out = chosen.directory.resolve()
    out.mkdir(parents=True, exist_ok=True)
    quick, began = chosen.quick, time.monotonic()
    rounds, lessons, more, pause, warm, repeats = (3, 100, 20, 6, 2, 1) if quick else (10, 200, 20, 8, 4, 5)
    batches = "1,4,16,32"
    asked = [str(value) for value in (rounds, pause, batches, warm, repeats)]
    if not chosen.plot_only:
        print(
            f"== 1. policies: {lessons} lessons, then {more} in each of {rounds} rounds of drift", flush=True
        )
        _run("policies", out, "policies.py", str(out), str(rounds), str(lessons), str(more))
        print(f"== 2. an engine with a drafter that learns, {pause} s after each round", flush=True)
        _run("co-trained", out, "rollouts.py", str(out), "co-trained", *asked)
        print("== 3. an engine with the drafter that the first had before the drift", flush=True)
        _run("frozen", out, "rollouts.py", str(out), "frozen", *asked)
    print("== 4. what came of it")
    _run("plot", out, "plot.py", str(out))
    print(f"done in {time.monotonic() - began:.0f} s: {out}")


def _run(name: str, out: Path, script: str, *arguments: str) -> None:
    """Run a script of `eagle`, showing the lines that it indents; all else is in ``NAME.log``."""
    from flashpatch.verify.probes.eagle import tiny

    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    if script == "rollouts.py":
        environment |= tiny.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment["FLASHPATCH_LEDGER"] = str(out / "ledger")
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            for line in process.stdout:
                log.write(line)
                if line.startswith("   ") or name == "plot":
                    print(line, end="", flush=True)
        finally:
            code = process.wait()
    if code:
        sys.exit(f"{name} failed, see {out / f'{name}.log'}")


if __name__ == "__main__":
    main()
