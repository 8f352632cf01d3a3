"""Two GRPO steps of unmodified verl with one variable in front."""

from pathlib import Path

import pytest
from private_modes import loose
from verl_job import live, metrics, train, trained

from flashpatch import ledger

pytestmark = pytest.mark.verl


@pytest.fixture
def world(wide_world: Path) -> Path:
    return wide_world


@pytest.mark.full
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("fp8", 0.05), ("int8", 0.05)])
def test_two_steps_with_updated_rollouts(world, tmp_path, precision, bound):
    output = trained(world, tmp_path, FLASHPATCH=f"cpu,{precision}")
    check_two_steps(output, live(tmp_path), bound, corrected=precision != "bf16")
    if precision == "int8":
        rows = [row for run in ledger.read(tmp_path / "ledger") for row in run.rows]
        [worker] = [row for row in rows if "worker" in row.roles]
        assert worker.notes["kernels"] == {"CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel": 8}


def test_two_steps_with_updated_fp8_rollouts_on_two_replicas(fp8_job):
    check_two_steps(fp8_job.output, fp8_job.processes, 0.05, corrected=True, replicas=2)


def test_what_every_process_of_the_job_recorded_is_private(fp8_job):
    written = fp8_job.folder / "ledger"
    assert len(list(written.rglob("*.json"))) > 5
    assert loose(written) == []


def check_two_steps(
    output: str, processes: list[dict], bound: float, corrected: bool, replicas: int = 1
) -> None:
    """Check a job of two steps: rollouts follow the updates within ``bound``, and are corrected for or not."""
    assert metrics(output, "training/global_step") == [1, 2]
    assert max(metrics(output, "training/rollout_probs_diff_max")) < bound
    advantages, norms = (metrics(output, name) for name in ("critic/advantages/max", "actor/grad_norm"))
    assert len(norms) == 2  # answers to a prompt may all be worth the same, and teach nothing
    assert [norm > 0 for norm in norms] == [most > 0 for most in advantages]

    roles = [role for process in processes for role in process["roles"]]
    assert {"driver", "trainer", "engine-core", "worker"} <= set(roles)
    workers = [process for process in processes if "worker" in process["roles"]]
    assert len(workers) == replicas
    for worker in workers:
        # the first load, then an update before the first step and one after each
        assert worker["patches"]["fp8.vllm.process_weights_after_loading"]["calls"] == 4
        assert worker["patches"]["cpu.verl.register_platform"]["state"] == "live"

    # what is drawn in 8 bits is corrected for, by verl; and how far it is from the trainer's, is measured
    assert bool(metrics(output, "rollout_corr/rollout_is_mean")) is corrected
    assert ("rollout_is=token: truncated importance sampling" in output) is corrected
    gaps = metrics(output, "mismatch/k3")
    assert len(gaps) == 2 and all(0 <= gap < bound for gap in gaps)
    assert metrics(output, "mismatch/suspect") == [0, 0]


@pytest.mark.full
def test_a_mixed_fleet_is_told_apart(world, tmp_path):
    """Two replicas, one in bf16 and one in fp8: every sample says which drew it, and so do the metrics."""
    output = trained(
        world,
        tmp_path,
        "trainer.n_gpus_per_node=2",
        FLASHPATCH="cpu,fp8",
        config='[[fp8.fleet]]\nprecision = "bf16"\n\n[[fp8.fleet]]\nprecision = "fp8"\n',
    )
    for precision in ("bf16", "fp8"):
        assert min(metrics(output, f"mismatch/tokens/{precision}")) > 0
    told = [metrics(output, f"mismatch/tokens/{precision}") for precision in ("bf16", "fp8")]
    assert [sum(step) for step in zip(*told, strict=True)] == metrics(output, "mismatch/tokens")
    for plain, rounded in zip(
        *(metrics(output, f"mismatch/k3/{name}") for name in ("bf16", "fp8")), strict=True
    ):
        assert plain < rounded < 0.05
    assert "rollouts run in bf16, fp8" in output


def test_a_recipe_that_cannot_run_ends_before_anything_starts(world, tmp_path):
    done = train(
        world,
        tmp_path,
        "critic.model.lora_rank=8",
        "actor_rollout_ref.actor.strategy=megatron",
        FLASHPATCH="cpu",
    )
    assert done.returncode != 0 and "ray init kwargs" not in done.stdout
    assert (
        "[flashpatch: cpu.verl.validate_config]" in done.stdout or "cpu.verl.validate_config" in done.stdout
    )
    for named in ("lora_rank=8", "strategy=megatron", "FLASHPATCH without bf16 or fp8"):
        assert named in done.stdout, done.stdout[-4000:]
