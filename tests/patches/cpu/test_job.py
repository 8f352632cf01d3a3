"""Two GRPO steps of unmodified verl with one variable in front."""

import pytest
from private_modes import loose
from verl_job import check_steps, live, metrics, of_role, train, trained

from flashpatch import ledger

pytestmark = pytest.mark.verl


@pytest.mark.full
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("fp8", 0.05), ("int8", 0.05)])
def test_two_steps_with_updated_rollouts(wide_world, tmp_path, precision, bound):
    output = trained(wide_world, tmp_path, FLASHPATCH=f"cpu,{precision}")
    check_two_steps(output, live(tmp_path), bound, corrected=precision != "bf16")
    if precision == "int8":
        rows = [row for run in ledger.read(tmp_path / "ledger") for row in run.rows]
        [worker] = [row for row in rows if "worker" in row.roles]
        assert worker.notes["kernels"] == {"CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel": 8}


def test_two_steps_with_updated_fp8_rollouts_on_two_replicas_and_private_records(fp8_job):
    check_two_steps(fp8_job.output, fp8_job.processes, 0.05, corrected=True, replicas=2)
    written = fp8_job.folder / "ledger"
    assert len(list(written.rglob("*.json"))) > 5
    assert loose(written) == []


def check_two_steps(output: str, processes: list[dict], bound: float, corrected: bool, replicas: int = 1):
    """Check a job of two steps: rollouts follow the updates within ``bound``, and are corrected for or not."""
    check_steps(output, bound, corrected)
    roles = [role for process in processes for role in process["roles"]]
    assert {"driver", "trainer", "engine-core", "worker"} <= set(roles)
    workers = of_role(processes, "worker")
    assert len(workers) == replicas
    for worker in workers:
        # the first load, then an update before the first step and one after each
        assert worker["patches"]["fp8.vllm.process_weights_after_loading"]["calls"] == 4
        assert worker["patches"]["cpu.verl.register_platform"]["state"] == "live"
    assert ("rollout_is=token: truncated importance sampling" in output) is corrected


@pytest.mark.full
@pytest.mark.parametrize(("names", "bound"), [("bf16", 0.01), ("fp8,fsdp", 0.05)])
def test_two_tensor_parallel_ranks(wide_world, tmp_path, names, bound):
    settings = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    output = trained(wide_world, tmp_path, *settings, FLASHPATCH=f"cpu,{names}")
    check_two_steps(output, live(tmp_path), bound, corrected=names != "bf16", replicas=2)


@pytest.mark.full
def test_a_mixed_fleet_is_told_apart(wide_world, tmp_path):
    """Two replicas, one in bf16 and one in fp8: every sample says which drew it, and so do the metrics."""
    fleet = '[[fp8.fleet]]\nprecision = "bf16"\n\n[[fp8.fleet]]\nprecision = "fp8"\n'
    output = trained(wide_world, tmp_path, "trainer.n_gpus_per_node=2", FLASHPATCH="cpu,fp8", config=fleet)
    told = [metrics(output, f"mismatch/tokens/{precision}") for precision in ("bf16", "fp8")]
    assert all(min(tokens) > 0 for tokens in told)
    assert [sum(step) for step in zip(*told, strict=True)] == metrics(output, "mismatch/tokens")
    gaps = (metrics(output, f"mismatch/k3/{precision}") for precision in ("bf16", "fp8"))
    assert all(plain < rounded < 0.05 for plain, rounded in zip(*gaps, strict=True))
    assert "rollouts run in bf16, fp8" in output


@pytest.mark.full  # test_verl_config.py has each refusal, eagle/sglang/test_refused.py a job that does not start
def test_a_recipe_that_cannot_run_ends_before_anything_starts(wide_world, tmp_path):
    wrong = ("critic.model.lora_rank=8", "actor_rollout_ref.actor.strategy=megatron")
    done = train(wide_world, tmp_path, *wrong, FLASHPATCH="cpu")
    assert done.returncode != 0 and "ray init kwargs" not in done.stdout
    assert "cpu.verl.validate_config" in done.stdout
    for named in ("lora_rank=8", "strategy=megatron", "FLASHPATCH without bf16 or fp8"):
        assert named in done.stdout, done.stdout[-4000:]
