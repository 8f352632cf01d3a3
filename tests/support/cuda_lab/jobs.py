"""Run whole jobs of verl on a CUDA device, two steps each; note what they said, and what their engines held.

    python -m cuda_lab.jobs update FOLDER OUT JOB...

A job is a recipe of `examples/gpu` with a tiny model; `flash_attn` is the stand-in of `fake_cuda/packages`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_job
import verl_job

from cuda_lab import device, results

MAKE = verl_job.EXAMPLE / "make.py"
OPENED = {"gsm8k_fp8": "fp8", "flowrl_7b": "bf16", "eagle_7b": "bf16"}


def main(_mode: str, root: str, out: str, *names: str) -> None:
    world = Path(root) / "world"
    subprocess.run([sys.executable, MAKE, world, "--hidden", "256"], check=True, cwd=MAKE.parent)
    for name in names:
        try:
            found = run(name, world, Path(out).with_name(name))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        results.add(out, name, found)


def run(name: str, world: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    overrides, variables = cuda_job.recipe(name, world, folder)
    variables = {**variables, "LAB_SERVED": str(folder / "served")}
    saving = cuda_job.saving(folder)
    done = cuda_job.train(world, folder, *saving, like=overrides, fake=device.IS_FAKE, **variables)
    print(done.stdout, flush=True)
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    opened = f"{OPENED[name]}@{{}}:{'graphs' if device.IS_FAKE else 'defaults'}"
    wrong, changed = cuda_job.compared(world / "model", folder, opened, 90 if device.IS_FAKE else 0)
    return {
        "wrong": wrong,
        "changed": changed,
        "away": verl_job.metrics(done.stdout, "training/rollout_probs_diff_max"),
        "seconds": verl_job.metrics(done.stdout, "perf/time_per_step"),
        "live": len(verl_job.live(folder)),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
