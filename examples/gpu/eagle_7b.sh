#!/usr/bin/env bash
# TLT's recipe (FastRL) with unmodified verl: GRPO on Qwen2.5-7B, 64 prompts of 8 responses up to 32768 tokens, rollouts
# drafted by an EAGLE drafter whose number of tokens a bandit chooses, eight GPUs of one node.
#
#   examples/gpu/eagle_7b.sh [SETTING=VALUE...]
#
# MODEL and DRAFTER are folders (hf download Qwen/Qwen2.5-7B --local-dir ...; published is the drafter
# mit-han-lab/Qwen2.5-7B-Eagle-RL), DATA holds train.parquet and validation.parquet, GPUS is the number of GPUs.
# ROLLOUT=sglang drafts trees as TLT does, with the configurations of eagle_sglang.toml; vLLM (the default) drafts chains.
# Settings go to verl.
#
# NOT RUN: this project has run two steps of it alone, with a tiny model and small numbers: on one H200, and by test on a fake
# CUDA device (verl 0.9.1, vLLM 0.24: make test-cuda-0.24). Trees under verl were never run at all.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-$HOME/models/Qwen2.5-7B}
DRAFTER=${DRAFTER:-$HOME/models/Qwen2.5-7B-Eagle-RL}
DATA=${DATA:-$HOME/data/eurus}
GPUS=${GPUS:-8}
ROLLOUT=${ROLLOUT:-vllm}
ATTENTION=${ATTENTION:-flash_attention_2}             # sdpa where flash-attn is not installed, as in the Dockerfile
PROMPT=1024
RESPONSE=$((1024 * 32))
TOKENS=$((PROMPT + RESPONSE))

engine=actor_rollout_ref.rollout.engine_kwargs
case $ROLLOUT in
vllm)
    drafting=("+$engine.vllm.speculative_config={method:eagle,model:'$DRAFTER',num_speculative_tokens:5}")
    config=$here/eagle.toml
    ;;
sglang)
    drafting=(
        "+$engine.sglang.speculative_algorithm=EAGLE"
        "+$engine.sglang.speculative_draft_model_path=$DRAFTER"
        "+$engine.sglang.speculative_num_steps=8"
        "+$engine.sglang.speculative_eagle_topk=4"
        "+$engine.sglang.speculative_num_draft_tokens=48"
        "+$engine.sglang.disable_overlap_schedule=True"
    )
    config=$here/eagle_sglang.toml
    ;;
*)
    echo "ROLLOUT=$ROLLOUT: choose vllm or sglang" >&2
    exit 2
    ;;
esac

FLASHPATCH=${FLASHPATCH:-bf16,eagle} FLASHPATCH_CONFIG=${FLASHPATCH_CONFIG:-$config} \
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/validation.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length="$PROMPT" \
    data.max_response_length="$RESPONSE" \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    +actor_rollout_ref.model.override_config.attn_implementation="$ATTENTION" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$TOKENS" \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$TOKENS" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$TOKENS" \
    "${drafting[@]}" \
    trainer.critic_warmup=0 \
    trainer.logger='[console]' \
    trainer.project_name=flashpatch \
    trainer.experiment_name=eagle_7b \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.nnodes=1 \
    trainer.val_before_train=False \
    trainer.save_freq=30 \
    trainer.test_freq=-1 \
    trainer.total_epochs=1 \
    "$@"
