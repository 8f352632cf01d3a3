"""A job of unmodified verl whose drafter starts as noise and is trained between rollouts."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_cotraining import STEPS, check_job, check_published, job, notes
from private_modes import loose
from verl_job import live, metrics

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.verl

TWO_RANKS = """
data.train_batch_size=4 actor_rollout_ref.rollout.n=2
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2
""".split()


@pytest.mark.full
def test_acceptance_rises_with_co_training(world, tmp_path):
    said = job(world, tmp_path)
    processes = live(tmp_path)
    worker, core, _ = (
        next(row for row in processes if role in row["roles"] and patch in row["patches"])
        for role, patch in (
            ("worker", "eagle.vllm.sample_tokens"),
            ("engine-core", "eagle.vllm.collective_rpc"),
            ("driver", "eagle.verl.update_weights"),
        )
    )
    assert worker["patches"]["eagle.vllm.sample_tokens"]["calls"] > 0
    assert worker["pid"] != core["pid"]
    check_job(said, notes(tmp_path), worker["pid"], core["pid"])
    assert loose(tmp_path / "saved" / "eagle") == []


@pytest.mark.full
def test_a_published_drafter_of_a_reduced_vocabulary_is_trained(verl_world, tmp_path):
    check_published(verl_world("--layers", "8"), tmp_path)


@pytest.mark.full
def test_two_replicas_fill_one_queue_and_get_the_same_drafter(world, tmp_path):
    said = job(world, tmp_path, *TWO_RANKS, options='capture = "engine"')
    versions = metrics(said, "eagle/drafter_version")
    assert versions[-1] >= 1
    found = notes(tmp_path).values()
    assert [noted["eagle_drafter"]["version"] for noted in found if "eagle_drafter" in noted] == [
        versions[-1]
    ] * 2
    captured = [noted for noted in found if isinstance(noted.get("eagle_capture"), dict)]
    assert len(captured) == 2 and all(noted["eagle_capture"]["requests"] > 0 for noted in captured)
    assert len({noted["eagle_samples"] for noted in captured}) == 1


@contextlib.contextmanager
def killing(folder: Path) -> Iterator[list[int]]:
    """Kill the drafter's trainer whenever another drafter is there, as the next slice may have begun."""
    ended, killed, drafters = threading.Event(), [], set()

    def kill() -> None:
        while not ended.wait(0.5):
            there = set((folder / "saved" / "eagle").rglob("drafter-*"))
            if there <= drafters:
                continue
            for process in psutil.process_iter(["cmdline"]):
                said = process.info["cmdline"] or ()
                if "flashpatch.patches.eagle.train" in said and str(folder) in said[-1]:
                    killed.append(process.pid)
                    process.kill()
                    break
            drafters.update(there)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


@pytest.mark.full
def test_a_trainer_that_is_killed_costs_no_rollout(world, tmp_path):
    with killing(tmp_path) as killed:
        said = job(world, tmp_path, options="adapt = false")
    assert len(killed) >= 2
    assert metrics(said, "training/global_step") == list(range(1, STEPS + 1))
    assert "no drafter is trained any more" not in said
    assert metrics(said, "eagle/drafter_version")[-1] >= 2
