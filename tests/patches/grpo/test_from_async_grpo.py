"""async-grpo's arguments become settings of verl and the family's options."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrating import loaded, migrate, script

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RECIPE = """
set base_model_path org/model
for i in (seq 0 7)
    if test $i -lt 7
        python worker_dispatcher.py --model_path /dev/shm/m --mode generation --tensor_parallel_size 1 \\
            --max_num_seqs 128 --write_failed_generation_samples --global_num_verifiers 50 | tee g_$i.log &
    else
        torchrun --nproc_per_node=1 --master_port=1234$i worker_dispatcher.py \\
            --model_path /dev/shm/m --mode logprob --max_tokens_per_gpu 30000 2>&1 | tee l_$i.log &
    end
end
torchrun --nproc_per_node=8 --nnodes=1 trainer_core.py \\
    --model_name_or_path $base_model_path --learning_rate 1e-6 --batch_size 64 --samples_per_question 8 \\
    --max_tokens_per_gpu 80000 --loss_chunksize 2048 --min_samples_per_checkpoint 1000 \\
    --fsdp_sharding_strategy FULL_SHARD --data_path d.jsonl --output_dir out 2>&1 | tee train.log
"""


def trained(*arguments: str, folder: Path) -> dict:
    return migrate("async-grpo", script(folder, f"torchrun trainer_core.py {' '.join(arguments)}"))


def test_a_script_of_the_published_kind(tmp_path: Path) -> None:
    said = migrate("async-grpo", script(tmp_path, RECIPE))
    assert said["enable"] == ["grpo"]
    assert said["options"]["grpo"] == {"reference_every": 40, "logprobs": True, "worker_requests": 136}
    verl = said["verl"]
    expected = {
        "actor_rollout_ref.model.path": "org/model",
        f"{ACTOR}.optim.lr": "1e-6",
        "data.train_batch_size": "64",
        f"{ACTOR}.ppo_mini_batch_size": "64",
        f"{ROLLOUT}.n": "8",
        f"{ROLLOUT}.max_num_seqs": "128",
        f"{ACTOR}.ppo_max_token_len_per_gpu": "80000",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "30000",
        f"{ACTOR}.fsdp_config.reshard_after_forward": "True",
        f"{ACTOR}.kl_loss_coef": "0.001",
        "trainer.n_gpus_per_node": "8",
        "trainer.nnodes": "1",
        "trainer.save_freq": "2",
        "trainer.v1.trainer_mode": "stream_async",
        "trainer.default_local_dir": "out",
        "reward.num_workers": "50",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ROLLOUT}.temperature": "0.6",
    }
    assert {name: verl.get(name) for name in expected} == expected
    assert said["code"] == 1 and [line.partition(":")[0] for line in said["not_carried_over"]] == [
        "--data_path d.jsonl",
        "--write_failed_generation_samples True",
        "GPUs that generate",
    ]
    assert "has branches or loops" in said["toml"]
    assert loaded(said["toml"], tmp_path).choices["grpo"].options["worker_requests"] == 136


@pytest.mark.parametrize(
    ("arguments", "verl"),
    [
        (["--constant_length_samples", "8192"], {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}),
        (["--constant_length_samples", "8192"], {f"{ACTOR}.loss_scale_factor": "8192"}),
        (["--fsdp_sharding_strategy=NO_SHARD"], {f"{ACTOR}.fsdp_config.fsdp_size": "1"}),
        (["--lr_scheduler", "cosine"], {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}),
        ([], {"trainer.save_freq": "8", "data.seed": "37"}),
    ],
)
def test_single_arguments(arguments: list[str], verl: dict, tmp_path: Path) -> None:
    assert verl.items() <= trained(*arguments, folder=tmp_path)["verl"].items()


@pytest.mark.parametrize(
    "argument",
    [
        "--insert_reasoning_phrases",
        "--lr_scheduler linear",
        "--fsdp_sharding_strategy HYBRID_SHARD",
        "--batch_size many",
        "--temperature $T",
        "--no_such_argument 1",
    ],
)
def test_what_is_not_carried_over_is_named(argument: str, tmp_path: Path) -> None:
    said = trained(argument, folder=tmp_path)
    assert said["code"] == 1 and f"not carried over: {argument}" in said["stderr"]


def test_a_script_without_async_grpo_says_so(tmp_path: Path) -> None:
    assert "no call of trainer_core.py" in migrate("async-grpo", script(tmp_path, "python x.py"))["stderr"]
