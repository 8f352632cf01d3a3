"""Switch causes of a gap off one at a time, each in an engine of its own, and measure what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashpatch.variables import names

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
RESOLVED = "FLASHPATCH_RESOLVED"  # goes with another FLASHPATCH
STEP = 16
"""Tokens of a step where a prefill is cut."""
EIGHT_BITS = ("fp8", "int8")


@dataclass(frozen=True)
class Cause:
    """One cause.

    Attributes:
        name: what was switched.
        to: how.
        kl: mean KL(model || engine) with that, nats; None if it could not be had.
        problem: why not.
    """

    name: str
    to: str
    kl: float | None
    problem: str = ""


def measured(model: str, engine: Mapping[str, Any], quantization: str, seconds: float) -> tuple[Cause, ...]:
    """Return the causes that a user can switch, each with the gap that is left.

    Args:
        model: the trainer's.
        engine: arguments of the engine that has all of them.
        quantization: how its weights are quantized, "" if they are not.
        seconds: after which one is given up.
    """
    return tuple(
        _run(name, to, model, {**engine, **change}, variables, seconds)
        for name, to, change, variables in _switches(engine, quantization)
    )


def _switches(
    engine: Mapping[str, Any], quantization: str
) -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """Yield what is switched, how, and the arguments and variables for it."""
    if quantization:
        given = names(os.environ.get("FLASHPATCH", ""))
        without = ["bf16" if name.startswith(EIGHT_BITS) else name for name in given]
        change = {"quantization": None} if "quantization" in engine else {}
        if change or without != list(given):
            yield "weights", "16 bits", change, {"FLASHPATCH": ",".join(without)}
    if engine.get("dtype", "bfloat16") != "float32" and not quantization:
        yield "dtype", "float32", {"dtype": "float32"}, {}
    cut = {"enable_chunked_prefill": True, "max_num_batched_tokens": STEP, "max_num_seqs": 1}
    if engine.get("max_num_batched_tokens", STEP + 1) > STEP:
        yield "prefill", f"in steps of {STEP} tokens", cut, {}


def _run(
    name: str, to: str, model: str, engine: Mapping[str, Any], variables: Mapping[str, str], seconds: float
) -> Cause:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            COMMAND,
            "exact",
            model,
            "--json",
            f"--seconds={seconds}",
            "--engine",
            json.dumps(engine),
        ],
        env={**{key: value for key, value in os.environ.items() if key != RESOLVED}, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        return Cause(name, to, None, said[-1])
    return Cause(name, to, None if found["problem"] else found["kl"], found["problem"])
