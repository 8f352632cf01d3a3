"""Two GRPO steps of unmodified verl with trainer and rollouts in processes of their own, which get all weights or differences."""

import pytest
from verl_job import SEPARATE, calls, check_faults, check_learned, live, metrics, of_role, trained

pytestmark = pytest.mark.verl


@pytest.mark.full  # in make test a job in mode stream_async takes the same way
def test_rollouts_in_processes_of_their_own_follow_the_updates(wide_world, tmp_path):
    output = trained(wide_world, tmp_path, *SEPARATE, FLASHPATCH="cpu,bf16,fsdp")
    check_learned(output, 0.005)  # samples of weights that are one update old differ by 0.014
    assert metrics(output, "sync/policy_version") == [2, 3]
    assert min(metrics(output, "gloo/buckets")) > 3
    assert "backend=gloo: weights reach separate rollouts through Ray's object store" in output
    processes = live(tmp_path)
    (worker,), (trainer,) = of_role(processes, "worker"), of_role(processes, "trainer")
    # the first load, then an update before the first step and one after each
    assert worker["patches"]["fp8.vllm.process_weights_after_loading"]["calls"] == 4
    assert worker["patches"]["fsdp.verl_vllm.receive_weights"]["calls"] == 3
    assert trainer["patches"]["cpu.verl.get_strategy_handlers"]["calls"] > 4
    assert calls(processes, "cpu.verl.separate_async_setup") == 1


@pytest.mark.full
def test_samples_are_drawn_while_the_trainer_trains(wide_world, tmp_path):
    """As verl does by default: one batch ahead, and with rollouts beside the trainer besides the separate ones."""
    settings = [setting for setting in SEPARATE if "num_warmup" not in setting and "hybrid" not in setting]
    output = trained(wide_world, tmp_path, *settings, FLASHPATCH="cpu,fp8,fsdp")
    live(tmp_path)
    assert metrics(output, "training/global_step") == [1, 2]
    assert "training/off_policy/trajectory_staleness/max:np.int64(1)" in output
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.1


RAISED = "LookupError: cannot place this tensor"
SENDER = "[flashpatch: fp8.verl_vllm.sender_init_socket]"


@pytest.mark.full
@pytest.mark.parametrize(
    "settings, fault, words",
    [
        (SEPARATE, "raise", (RAISED, "CheckpointEngineWorker.update_weights()")),
        (SEPARATE, "kill", ("the rollout",)),
        ([], "raise", (RAISED, "in _update_weights", SENDER)),
        ([], "kill", ("the rollout", SENDER)),
    ],
    ids=["raise", "kill", "raise-beside-the-trainer", "kill-beside-the-trainer"],
)
def test_an_engine_that_fails_in_an_update_ends_the_job(wide_world, tmp_path, settings, fault, words):
    said = check_faults(wide_world, tmp_path, fault, words, *settings)
    assert settings or metrics(said, "training/global_step") == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_a_job_in_which_few_weights_change_sends_few_bytes(wide_world, tmp_path, dtype):
    """In verl's default, fp32, the first sync is in float32, all later ones are in bf16."""
    masters = f"actor_rollout_ref.actor.fsdp_config.model_dtype={dtype}"
    settings = (*SEPARATE, "actor_rollout_ref.actor.optim.lr=1e-6", masters)
    on = dict(FLASHPATCH="cpu,int8,fsdp", config="[fp8]\ndelta_sync = true\n")
    output = trained(wide_world, tmp_path, *settings, **on)
    assert metrics(output, "training/global_step") == [1, 2]
    assert metrics(output, "sync/policy_version") == [2, 3]
    shares = metrics(output, "sync/wire_share")
    assert len(shares) == 2 and 0 < max(shares) < 0.2  # the first of all comes before the first step
    assert min(metrics(output, "sync/changed_share")) > 0
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.1
    processes = live(tmp_path)
    (worker,), (trainer,) = of_role(processes, "worker"), of_role(processes, "trainer")
    assert trainer["patches"]["fp8.verl.actor_update_weights_delta"]["calls"] == 3
    assert worker["patches"]["fsdp.verl_vllm.receive_weights"]["calls"] == 3
