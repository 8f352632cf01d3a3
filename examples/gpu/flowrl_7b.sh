#!/usr/bin/env bash
# FlowRL's recipe for mathematics with unmodified verl and vLLM: Qwen2.5-7B, 512 prompts of 8 responses up to 8192 tokens,
# 16 updates per batch, eight GPUs of one node. flowrl.toml beside this file has the dropout of the published code.
#
#   examples/gpu/flowrl_7b.sh [SETTING=VALUE...]
#
# MODEL, DATA and GPUS override where the model and the parquet files (dapo-math-17k.parquet, validation.parquet) are, and
# the number of GPUs. Settings go to verl. FLASHPATCH=fp8,flowrl in front generates in fp8.
#
# NOT RUN: this project has run two steps of it alone, with a tiny model and small numbers: on one H200, and by test on a fake
# CUDA device (verl 0.9.1, vLLM 0.24: make test-cuda-0.24).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-$HOME/data/math}
GPUS=${GPUS:-8}
ATTENTION=${ATTENTION:-flash_attention_2}             # sdpa where flash-attn is not installed, as in the Dockerfile
PROMPT=2048
RESPONSE=8192
TOKENS=$((PROMPT + RESPONSE))

FLASHPATCH=${FLASHPATCH:-bf16,flowrl} FLASHPATCH_CONFIG=${FLASHPATCH_CONFIG:-$here/flowrl.toml} \
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$DATA/dapo-math-17k.parquet" \
    data.val_files="$DATA/validation.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length="$PROMPT" \
    data.max_response_length="$RESPONSE" \
    data.truncation=left \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    +actor_rollout_ref.model.override_config.attn_implementation="$ATTENTION" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$TOKENS" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$TOKENS" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$TOKENS" \
    trainer.logger='[console]' \
    trainer.project_name=flashpatch \
    trainer.experiment_name=flowrl_7b \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.test_freq=5 \
    trainer.total_epochs=1 \
    "$@"
