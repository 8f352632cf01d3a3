"""GRPO steps of unmodified verl whose rollouts are SGLang's, with one variable in front."""

import pytest
import sglang_lab as lab
from tree import SUPPORT
from verl_job import check_steps, live, metrics, of_role, train, trained

pytestmark = [pytest.mark.verl, pytest.mark.sglang]

SGLANG = ("actor_rollout_ref.rollout.name=sglang",)
QUANTIZED = dict(STANDIN_AMX="1", TORCHDYNAMO_DISABLE="1")
TWO_GPUS = "trainer.n_gpus_per_node=2"
UPDATES = ("begin_weight_update", "update_weights_from_tensor", "end_weight_update")
if lab.OLD:
    UPDATES = ("update_weights_from_tensor", "runner_update_weights_from_tensor")


def check(output: str, processes: list[dict], bound: float, corrected: bool, schedulers: int = 1) -> None:
    """Check a job of two steps: rollouts follow the updates within ``bound``; all processes and patches are there."""
    check_steps(output, bound, corrected)
    assert max(metrics(output, "training/rollout_probs_diff_max")) > 0
    assert metrics(output, "sync/policy_version") == [2, 3]
    workers = of_role(processes, "worker")
    assert len(workers) == schedulers
    for worker in workers:
        for name in UPDATES:
            assert worker["patches"][f"fp8.{lab.FRAMEWORK}.{name}"]["state"] == "live", worker["patches"]
    update = f"fp8.verl_{lab.FRAMEWORK}.server_adapter_update_weights"
    assert any(one["patches"][update]["calls"] == 3 for one in of_role(processes, "trainer"))


@pytest.mark.full  # test_sync.py updates such servers in `make test`
def test_two_steps_with_updated_fp8_rollouts(wide_world, tmp_path):
    output = trained(wide_world, tmp_path, *SGLANG, FLASHPATCH="cpu,fp8", **QUANTIZED)
    check(output, live(tmp_path), 0.05, corrected=True)


@pytest.mark.full
def test_a_job_prints_its_certificate_and_trains(wide_world, tmp_path):
    output = trained(
        wide_world, tmp_path, *SGLANG, FLASHPATCH="cpu,bf16", config='[fp8]\ncertificate = "stop"\n'
    )
    assert "engine and trainer agree to rounding" in output
    check(output, live(tmp_path), 0.01, corrected=False)  # its own engine is no evidence of the job's


@pytest.mark.full
@pytest.mark.skipif(not lab.OLD, reason="newer versions have their jobs below, and in tests/patches/fsdp")
def test_four_families_on_the_version_that_stock_verl_installs(wide_world, tmp_path):
    output = trained(wide_world, tmp_path, *SGLANG, FLASHPATCH="cpu,int8,grpo,fsdp", **QUANTIZED)
    check(output, live(tmp_path), 0.05, corrected=True)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_two_tensor_parallel_ranks(wide_world, tmp_path, strategy):
    settings = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", TWO_GPUS]
    settings += [f"actor_rollout_ref.{role}.strategy={strategy}" for role in ("actor", "ref")]
    output = trained(wide_world, tmp_path, *SGLANG, *settings, FLASHPATCH="cpu,bf16")
    check(output, live(tmp_path), 0.01, corrected=False, schedulers=2)


@pytest.mark.full
def test_two_replicas_of_different_precision_are_told_apart(wide_world, tmp_path):
    fleet = '[[fp8.fleet]]\nprecision = "bf16"\n\n[[fp8.fleet]]\nprecision = "int8"\n'
    more = dict(FLASHPATCH="cpu,fp8", config=fleet, **QUANTIZED)
    output = trained(wide_world, tmp_path, *SGLANG, TWO_GPUS, **more)
    check(output, live(tmp_path), 0.05, corrected=True, schedulers=2)
    told = [metrics(output, f"mismatch/tokens/{precision}") for precision in ("bf16", "int8")]
    assert [sum(step) for step in zip(*told, strict=True)] == metrics(output, "mismatch/tokens")
    assert all(min(tokens) > 0 for tokens in told)


@pytest.mark.full
def test_a_loader_that_raises_ends_the_job_by_name(wide_world, tmp_path):
    fault = tmp_path / "fault"
    fault.write_text("raise")
    faults = dict(SGLANG_FAULT=str(fault), PYTHONPATH=str(SUPPORT / "sglang_faults"))
    done = train(wide_world, tmp_path, *SGLANG, FLASHPATCH="cpu,bf16", **faults)
    assert done.returncode not in (0, None) and metrics(done.stdout, "training/global_step") == []
    failed = "LookupError: cannot place this tensor"
    for word in (f"[flashpatch: fp8.verl_{lab.FRAMEWORK}.", failed, "in load_weights"):
        assert word in done.stdout, done.stdout[-8000:]
