#!/usr/bin/env bash
# FlashRL's first recipe with unmodified verl and vLLM: PPO on GSM8K, Qwen2.5-0.5B-Instruct, rollouts in fp8, truncated
# importance sampling with a cap of 2, four GPUs of one node.
#
#   examples/gpu/gsm8k_fp8.sh [SETTING=VALUE...]
#
# MODEL, DATA and GPUS override where the model and the parquet files of verl's examples/data_preprocess/gsm8k.py are,
# and the number of GPUs. Settings go to verl; FLASHPATCH=bf16 in front is the same without quantization.
#
# verl makes the critic with flash-attn, whatever ATTENTION says, and through the package trl too: run this in an image of verl's own,
# which has it; the Dockerfile does not install it.
#
# NOT RUN: this project has run two steps of it alone, with a tiny model and small numbers: on one H200, and by test on a fake
# CUDA device (verl 0.9.1, vLLM 0.24: make test-cuda-0.24).
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=${GPUS:-4}
ATTENTION=${ATTENTION:-flash_attention_2}             # sdpa where flash-attn is not installed, as in the Dockerfile

FLASHPATCH=${FLASHPATCH:-fp8} \
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=False \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=False \
    +actor_rollout_ref.model.override_config.attn_implementation="$ATTENTION" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    critic.model.path="$MODEL" \
    critic.model.use_remove_padding=False \
    critic.model.enable_gradient_checkpointing=False \
    +critic.model.override_config.attn_implementation="$ATTENTION" \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    trainer.critic_warmup=0 \
    trainer.logger='[console]' \
    trainer.project_name=flashpatch \
    trainer.experiment_name=gsm8k_fp8 \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.nnodes=1 \
    trainer.val_before_train=True \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=15 \
    "$@"
