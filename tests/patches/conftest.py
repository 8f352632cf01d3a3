"""Worlds and jobs of verl that tests of several families share: a job takes minutes, and each looks at its own part."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_lab
import pytest

TWO_RANKS = """
data.train_batch_size=4 actor_rollout_ref.rollout.n=4
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2
""".split()


@dataclass(frozen=True)
class Job:
    """A job that came to its end: what it printed, its folder, the processes that `--live` listed."""

    output: str
    folder: Path
    processes: list[dict[str, Any]]


@pytest.fixture
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Run Python code on the installed verl in a process of its own; it must succeed, and its output is returned.

    ``FLASHPATCH=names``: the folder's family, or what the module's ``NAMES`` says; empty for none."""
    family = request.path.relative_to(Path(__file__).parent).parts[0]
    own = getattr(request.module, "NAMES", family)

    def run(code: str, names: str = own, **extra: str) -> str:
        return cpu_lab.checked(code, tmp_path, **({"FLASHPATCH": names} if names else {}), **extra).stdout

    return run


@pytest.fixture(scope="session")
def verl_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tokenizer, data and a tiny model for verl, made once for the same settings of `make.py`."""
    import verl_job

    @functools.cache
    def made(*settings: str) -> Path:
        return verl_job.make_world(tmp_path_factory.mktemp("world"), *settings)

    return made


@pytest.fixture(scope="session")
def world(verl_world) -> Path:
    """A world with the smallest model."""
    return verl_world()


@pytest.fixture(scope="session")
def wide_world(verl_world) -> Path:
    """A world whose model's weights fill several buckets, cut inside fused layers."""
    return verl_world("--hidden", "256")


@pytest.fixture(scope="session")
def two_ranks() -> list[str]:
    """verl's settings for two ranks and two replicas."""
    return list(TWO_RANKS)


@pytest.fixture(scope="session")
def fp8_job(wide_world, two_ranks, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two steps with rollouts in the scheme that a GPU gets, on two FSDP2 ranks and two replicas, each sync audited."""
    import verl_job

    from flashpatch.patches.fp8.precision import fleet

    folder = tmp_path_factory.mktemp("fp8-job")
    fsdp2 = [f"actor_rollout_ref.{role}.strategy=fsdp2" for role in ("actor", "ref")]
    config = f'[fp8]\nscheme = "{fleet.DEFAULT_SCHEMES["accelerator"]}"\n'
    how = dict(FLASHPATCH="cpu,fp8,fsdp", config=config)
    output = verl_job.trained(wide_world, folder, *two_ranks, *fsdp2, **how)
    return Job(output, folder, verl_job.live(folder))
