"""Record response lengths of a real verl job, as a trace for `router.py`.

    python benchmarks/record_lengths.py OUT.jsonl [--steps 6] [--lessons 60]

A tiny model is taught to count: for ``7+5=`` it writes twelve strokes, with a sign between, and the sum. Taught as
shortly as by default, its responses to one prompt are as unlike as to two; ten times the lessons change that. verl
then trains it by GRPO with `grpo`'s router, on 48 problems in batches of 16 with 8 responses each, and the router
records them. Needs verl and vLLM on a CPU; ten minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import gzip
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import quick

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "verl_cpu"), str(ROOT / "tests" / "support")]

SETTINGS = """
data.train_batch_size=16 data.max_response_length=128 data.seed=1 trainer.total_epochs=100
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=1e-4
actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.max_model_len=192
actor_rollout_ref.rollout.max_num_seqs=16
""".split()


def counted(draw: random.Random, largest: int) -> tuple[str, str]:
    """A sum, and how it is worked out."""
    a, b = draw.randint(1, largest), draw.randint(1, largest)
    return f"{a}+{b}=", f"{'|' * a}+{'|' * b}={a + b}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lessons", type=int, default=60)
    parser.add_argument("--largest", type=int, default=20)
    given = quick.parse(parser, steps=1, lessons=2)
    import make
    import torch
    import verl_job

    make.problem = counted
    torch.manual_seed(0)
    draw, words = random.Random(0), make.tokenizer()
    pupil = make.model(len(words))
    make.supervise(pupil, words, given.lessons, draw, given.largest, 0.0)
    with tempfile.TemporaryDirectory(prefix="fpt", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        pupil.save_pretrained(folder / "model")
        words.save_pretrained(folder / "model")
        for part in ("train", "test"):
            make.rows(48, draw, given.largest).to_parquet(folder / f"{part}.parquet")
        trace = folder / "trace.jsonl"
        options = folder / "flashpatch.toml"
        options.write_text(f'[grpo]\nrouter_trace = "{trace}"\n')
        steps = f"trainer.total_training_steps={given.steps}"
        variables = {"FLASHPATCH": "cpu,bf16,grpo", "FLASHPATCH_CONFIG": str(options)}
        try:
            done = verl_job.train(folder, folder / "job", *SETTINGS, steps, **variables)
        except subprocess.TimeoutExpired as error:
            sys.exit(f"the job did not end: {error}")
        if done.returncode:
            sys.exit(done.stdout[-8000:])
        opened = gzip.open if given.out.suffix == ".gz" else open
        with opened(given.out, "wt") as out:
            out.write(trace.read_text())
    print(f"{given.out}: {sum(1 for _ in (gzip.open if opened is gzip.open else open)(given.out))} responses")


if __name__ == "__main__":
    main()
