"""What int8 rollouts and corrections of rollout against trainer do to whole GRPO jobs: mismatch, reward, seconds.

    python benchmarks/reward.py WORLD|moe [--names bf16,int8] [--kinds nothing,tis,...] [--steps 6] [--seeds 1]
                                [--keep FOLDER] [--picture OUT.png] [--curves OUT.png] [SETTING...]

WORLD is a directory made by examples/world/make.py, moe a tiny random mixture of experts made
on the spot, which vLLM does not open in int8 on a CPU (--names bf16). Needs verl and
vLLM. Jobs of `verl.trainer.main_ppo` under `FLASHPATCH=cpu,NAME`, one after the other, with the same seeds, sampling
with top_p=0.9 and top_k=50; they differ in what is done about the mismatch of rollout and trainer:

    nothing    nothing
    tis        verl's truncated importance sampling per token, with a cap of 2
    head       the head of both in float32 (option `lm_head`)
    all        these two

Printed per job: k3 of rollout and trainer (mean and largest of the steps), the largest importance weight before any truncation,
reward of the first and of the last quarter of the steps, seconds of a step and of its rollouts (medians without
the first step), and reward gained per minute. Then int8 over bf16 in seconds, and k3 over that of "nothing".

FOLDER keeps each job's log and metrics; a job whose metrics are there is not run again. --picture draws k3 and weights,
--curves the reward by seconds of training. OMP_NUM_THREADS is the trainer's threads, 1 if it is not set."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

import quick
import turns

TREE = Path(__file__).resolve().parents[1]
EXAMPLE = TREE / "examples" / "verl_cpu"
REWARD, K3, LEAST = "critic/score/mean", "rollout_corr/k3_kl", "rollout_corr/rollout_rs_token_k1_min"
ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
TOP_K = 50

JOB = """
algorithm.adv_estimator=grpo data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8
data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.gpu_memory_utilization=0.1 actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1
+ray_kwargs.ray_init.object_store_memory=200000000
""".split()

COMMON = f"""
{ROLLOUT}.calculate_log_probs=True {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k={TOP_K}
{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold='1e-9_1e9'
reward.custom_reward_function.path={TREE}/examples/world/reward.py
trainer.v1.sampler.custom_sampler.path={EXAMPLE}/sampler.py trainer.v1.sampler.custom_sampler.name=Eager
trainer.logger=[console,file] trainer.total_epochs=100
actor_rollout_ref.model.use_remove_padding=True
""".split()
"""Settings of all jobs. The rejection sampling rejects nothing: verl measures the least log ratio for it."""

WORLD = f"""
data.train_batch_size=2 data.max_prompt_length=64 data.max_response_length=160
actor_rollout_ref.actor.optim.lr=2e-5
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8 {ROLLOUT}.n=4 {ROLLOUT}.max_model_len=224
{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=128
""".split()

TIS = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2.0")
HEAD = 'lm_head = "float32"'
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nothing": ((), ()),
    "tis": (TIS, ()),
    "head": ((), (HEAD,)),
    "all": (TIS, (HEAD,)),
}
"""Settings of verl and options of FlashPatch, by what is done."""


@dataclass(frozen=True)
class Job:
    """One job: precision of its rollouts, what is done about the mismatch, seed."""

    name: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.seed}"

    def rows(self, folder: Path) -> list[dict[str, float]]:
        """Its metrics by step, as far as they are there."""
        file = folder / f"{self}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for row in (json.loads(line)["data"] for line in lines) if REWARD in row]

    def curve(self, folder: Path) -> dict[str, list[float]]:
        """Its reward after each step, and the seconds since the first step began."""
        rows = self.rows(folder)
        return {
            "seconds": list(accumulate(row["timing_s/step"] for row in rows)),
            "reward": [row[REWARD] for row in rows],
        }

    def run(self, world: Path, settings: list[str], steps: int, folder: Path) -> list[dict[str, float]]:
        """Run it, unless its metrics are there; return them.

        Raises:
            SystemExit: the job failed; the message names its log."""
        if len(found := self.rows(folder)) >= steps:
            return found[:steps]
        (folder / f"{self}.jsonl").unlink(missing_ok=True)
        more, options = KINDS[self.kind]
        config = folder / f"{self}.toml"
        config.write_text("\n".join(["[fp8]", *options, ""]))
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo", *JOB, *COMMON, *settings, *more),
            *(f"data.train_files={world}/train.parquet", f"data.val_files={world}/test.parquet"),
            *(f"actor_rollout_ref.model.path={world}/model", f"data.seed={self.seed}"),
            *(f"{ROLLOUT}.seed={self.seed}", f"trainer.total_training_steps={steps}"),
            *(f"trainer.default_local_dir={folder}/saved", f"hydra.run.dir={folder}/hydra"),
        ]
        variables = {
            **os.environ,
            **turns.ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLASHPATCH": f"cpu,{self.name}",
            "FLASHPATCH_LEDGER": str(folder / "ledger"),
            "FLASHPATCH_CONFIG": str(config),
            "FLASHPATCH_RUN": str(self),
            "RAY_worker_niceness": "0",
            "VERL_FILE_LOGGER_PATH": str(folder / f"{self}.jsonl"),
        }
        with (folder / f"{self}.log").open("wb") as log:
            done = subprocess.run(command, env=variables, cwd=folder, stdout=log, stderr=log)
        found = self.rows(folder)
        if done.returncode or len(found) != steps:
            raise SystemExit(
                f"the job {self} failed with exit code {done.returncode}; see {folder}/{self}.log"
            )
        return found


@dataclass
class Found:
    """What one job reported."""

    k3: float
    worst: float
    weight: float
    first: float
    last: float
    step: float
    rollout: float
    minutes: float

    @classmethod
    def of(cls, rows: list[dict[str, float]]) -> Found:
        """Summarize the metrics of a job's steps; the first of them takes longer, and no figure in seconds has it."""
        quarter = max(1, len(rows) // 4)
        rewards, k3 = [row[REWARD] for row in rows], [row[K3] for row in rows]
        seconds = [row["timing_s/step"] for row in rows[1:]]
        return cls(
            mean(k3),
            max(k3),
            math.exp(-min(row[LEAST] for row in rows)),
            mean(rewards[:quarter]),
            mean(rewards[-quarter:]),
            median(seconds),
            median(row["timing_s/gen"] for row in rows[1:]),
            sum(seconds) / 60,
        )

    @property
    def gained(self) -> float:
        """Reward gained per minute."""
        return (self.last - self.first) / self.minutes

    def __str__(self) -> str:
        return (
            f"{self.k3:8.2g} {self.worst:8.2g} {self.weight:8.3g} {self.first:7.3f} {self.last:7.3f} "
            f"{self.step:8.1f} {self.rollout:8.1f} {self.gained:+10.3f}"
        )


def experts(folder: Path) -> Path:
    """Make a world of sums and a random OLMoE in ``folder``. Of Qwen3 verl would ask its tokenizer's special tokens."""
    subprocess.run([sys.executable, EXAMPLE / "make.py", folder], check=True, capture_output=True)
    import torch
    from transformers import AutoConfig, OlmoeConfig, OlmoeForCausalLM

    plain = AutoConfig.from_pretrained(folder / "model")
    torch.manual_seed(0)
    made = OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=plain.vocab_size,
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=plain.eos_token_id,
            pad_token_id=plain.pad_token_id,
            initializer_range=0.2,
        )
    )
    made.to(torch.bfloat16).save_pretrained(folder / "model")
    return folder


def numbers(found: dict[Job, Found], seed: int) -> dict[str, Any]:
    """What the picture shows: k3 and largest weight of a seed's jobs."""
    jobs = {job: one for job, one in found.items() if job.seed == seed}
    return {"picture": "corrections"} | {
        part: {
            name: {job.kind: getattr(one, part) for job, one in jobs.items() if job.name == name}
            for name in dict.fromkeys(job.name for job in jobs)
        }
        for part in ("k3", "weight")
    }


def compare(found: dict[Job, Found], names: list[str]) -> None:
    """Print the last precision's seconds over the first's, and k3 over that of the jobs that correct nothing."""

    def of(part: str, **wanted: str) -> float:
        """The mean of a figure of the jobs whose name or kind is wanted."""
        return mean(
            getattr(one, part)
            for job, one in found.items()
            if all(getattr(job, key) == value for key, value in wanted.items())
        )

    if len(names) > 1:
        step, rollout = (of(part, name=names[-1]) / of(part, name=names[0]) for part in ("step", "rollout"))
        print(f"{names[-1]} over {names[0]}: a step takes {step:.2f}, its rollouts {rollout:.2f}")
    kinds = [kind for kind in dict.fromkeys(job.kind for job in found) if kind != "nothing"]
    for name in names if kinds and any(job.kind == "nothing" for job in found) else ():
        nothing = of("k3", name=name, kind="nothing")
        parts = ", ".join(f"{kind} {of('k3', name=name, kind=kind) / nothing:.3g}" for kind in kinds)
        print(f"{name}: k3 over that of nothing: {parts}")


def main() -> None:
    """Run the jobs, and print a table."""
    parser = quick.parser(__doc__)
    parser.add_argument("world", metavar="WORLD|moe")
    parser.add_argument("settings", nargs="*", help="verl's own, which win; before the options")
    parser.add_argument("--names", default="bf16,int8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--keep", type=Path, help="folder for logs and metrics")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--curves", type=Path)
    given = quick.parse(parser, names="bf16", kinds="all", steps=2)
    folder = (given.keep or Path(tempfile.mkdtemp(prefix="reward-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names, kinds = given.names.split(","), given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    tiny = given.world == "moe"
    world = folder / "moe" if tiny else Path(given.world).resolve()
    if tiny and not (world / "test.parquet").exists():
        experts(world)
    settings = [*([] if tiny or given.quick else WORLD), *given.settings]
    print(f"{turns.cpu()}; {given.steps} steps")
    print(
        f"{'':12} {'seed':>4} {'k3':>8} {'worst':>8} {'weight':>8} {'reward':>15} {'step, s':>8} {'rollout':>8} {'a minute':>10}"
    )
    found, seeds = {}, [int(seed) for seed in given.seeds.split(",")]
    for job in (Job(name, kind, seed) for seed in seeds for kind in kinds for name in names):
        found[job] = Found.of(job.run(world, settings, given.steps, folder))
        print(f"{job.name:4} {job.kind:7} {job.seed:4} {found[job]}", flush=True)
    pictures = {given.picture: numbers(found, seeds[0])} if given.picture else {}
    if given.curves:
        curves: dict[str, list[dict[str, list[float]]]] = {}
        for job in found:
            curves.setdefault(f"{job.name}, {job.kind}", []).append(job.curve(folder))
        pictures[given.curves] = {"picture": "reward by seconds", "jobs": curves}
    if pictures:
        sys.path.insert(1, str(TREE / "examples"))
        from pictures import finish

        finish(pictures)
    compare(found, names)


if __name__ == "__main__":
    main()
