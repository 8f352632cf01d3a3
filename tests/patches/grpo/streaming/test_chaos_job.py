"""Jobs in mode stream_async whose processes are killed or stopped for a while at random, in validation steps too: no
sample is trained twice, and none is lost.

``CHAOS_KILLS=100 pytest -m full tests/patches/grpo/streaming/test_chaos_job.py`` takes 100 kills; the seed is printed."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from verl_job import end, metrics, processes, said, start, trained, wait

pytestmark = [pytest.mark.verl, pytest.mark.full]

KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
SETTINGS = """
trainer.v1.trainer_mode=stream_async
actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=2
actor_rollout_ref.rollout.agent.num_workers=2
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400
data.max_response_length=48 actor_rollout_ref.rollout.max_model_len=96
trainer.test_freq=2 trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=2 trainer.total_epochs=1000
""".split()
AGENT, SERVER, TRAINER = "ray::AgentLoopWorkerTQ", "ray::vLLMHttpServer", "the trainer"
STOPPED = " stopped"


def test_no_sample_is_trained_twice_and_none_is_lost(world: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1 << 30)))
    print("CHAOS_SEED", seed)
    draw, killed, folders = random.Random(seed), Counter(), []
    folders = f"trainer.default_local_dir={tmp_path}/saved", f"trainer.rollout_data_dir={tmp_path}/trained"
    settings = (*SETTINGS, *folders)
    names = dict(FLASHPATCH="cpu,bf16,grpo")
    while killed.total() < KILLS:
        folders.append(tmp_path / f"run{len(folders)}")
        job = start(world, folders[-1], *settings, "trainer.total_training_steps=100000", **names)
        try:
            killed += until_the_trainer_dies(job, folders[-1], draw, KILLS - killed.total())
        finally:
            end(job)
        print(dict(killed), flush=True)
    ends = [max((0, *metrics(said(folder), "training/global_step"))) for folder in folders]
    last = int(max(ends)) + 3
    trained(world, tmp_path / "last", *settings, f"trainer.total_training_steps={last}", **names)
    check_trained(tmp_path / "trained", last, ends)
    assert killed[AGENT] and killed[SERVER] and killed[TRAINER], killed
    assert any("val-core/" in said(folder) for folder in folders)
    assert killed[AGENT + STOPPED] and killed[SERVER + STOPPED], killed


def check_trained(folder: Path, last: int, ends: list[float]) -> None:
    """Every step has its samples, and no sample is in two. verl lists a step's samples after it has saved the step, so
    the list may be missing of a step in which a trainer died."""
    steps = {int(file.stem): file.read_text().splitlines() for file in folder.glob("*.jsonl")}
    assert {*range(1, last + 1)} - steps.keys() <= {end + 1 for end in ends}
    assert {len(lines) for lines in steps.values()} == {32}
    times = Counter(json.loads(line)["uid"] for lines in steps.values() for line in lines)
    assert set(times.values()) == {1}, times.most_common(3)


def until_the_trainer_dies(job: Any, folder: Path, draw: random.Random, kills: int) -> Counter[str]:
    """Kill processes of a job; the last one that is killed is the trainer. It must go on after each of the others."""
    killed: Counter[str] = Counter()
    wait(job, folder, lambda: metrics(said(folder), "training/global_step"))
    most = min(kills, draw.randint(8, 14))
    due = draw.sample([(name, stopped) for name in (AGENT, SERVER) for stopped in (True, False)], 4)
    while killed.total() + 1 < most:
        time.sleep(draw.uniform(0.0, 6.0))
        name, stopped = (
            due.pop() if due else (draw.choice([AGENT, AGENT, AGENT, SERVER]), draw.random() < 0.3)
        )
        if name == SERVER:  # the last server's death ends a job
            wait(job, folder, lambda: started_again(folder) == lost(folder) >= killed[SERVER])
        one = draw.choice(wait(job, folder, lambda name=name: processes(job, name)))
        steps = len(metrics(said(folder), "training/global_step"))
        if stopped:
            name += STOPPED
            stop(one, draw.uniform(5.0, 60.0))
        else:
            one.kill()
        killed[name] += 1
        began = time.monotonic()
        wait(job, folder, lambda steps=steps: len(metrics(said(folder), "training/global_step")) > steps)
        print(f"{name}: in step {steps + 1}, which ended {time.monotonic() - began:.1f} s later", flush=True)
    time.sleep(draw.uniform(0.0, 6.0))
    killed[TRAINER] += 1
    return killed


def stop(one: Any, seconds: float) -> None:
    """Stop a process for a while: its actor is slow, and Ray may call it unavailable."""
    import psutil

    one.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):  # the job had enough of it
        one.send_signal(signal.SIGCONT)


def lost(folder: Path) -> int:
    """How many servers the job has removed."""
    return len(re.findall(r"rollout server \S+ is lost", said(folder)))


def started_again(folder: Path) -> int:
    """How many servers have been started again, and had their first update."""
    return sum(
        len(line.split(", ")) for line in re.findall(r"rollout servers started again: (.*)", said(folder))
    )
