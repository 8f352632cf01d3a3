"""Take over the command-line arguments of async-grpo: its trainer's and its workers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashpatch.migration.given import Call, Given, Setting
from flashpatch.migration.plan import Plan

HELP = "async-grpo: Red-Hat-AI-Innovation-Team/async-grpo"

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TRAINER, WORKER = "trainer_core.py", "worker_dispatcher.py"
BATCH, SAMPLES = 128, 32
"""async-grpo's defaults of ``--batch_size`` and ``--samples_per_question``."""

DEFAULTS = {
    "--learning_rate": "2e-06",
    "--batch_size": str(BATCH),
    "--num_warmup_steps": "10",
    "--max_tokens_per_gpu": "36000",
    "--temperature": "0.6",
    "--max_generation_tokens": "8192",
    "--samples_per_question": str(SAMPLES),
    "--min_samples_per_checkpoint": "30000",
    "--lr_scheduler": "constant_with_warmup",
    "--fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "--infinite_sampler_seed": "37",
}
"""async-grpo's own values, which hold where a command names none."""
FIXED = {
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.optim.betas": [0.9, 0.95],
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.use_dynamic_bsz": True,
    "trainer.v1.trainer_mode": "stream_async",
    f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
    f"{ROLLOUT}.name": "vllm",
}
"""What async-grpo has in its code, as settings of verl."""
REFERENCE_EVERY = 40
"""Batches after which async-grpo's reference becomes the current policy; in its code."""

RENAMED = {
    "--model_name_or_path": (f"{MODEL}.path",),
    "--learning_rate": (f"{ACTOR}.optim.lr",),
    "--num_warmup_steps": (f"{ACTOR}.optim.lr_warmup_steps",),
    "--batch_size": ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    "--max_tokens_per_gpu": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "--temperature": (f"{ROLLOUT}.temperature",),
    "--max_generation_tokens": ("data.max_response_length",),
    "--samples_per_question": (f"{ROLLOUT}.n",),
    "--infinite_sampler_seed": ("data.seed",),
    "--output_dir": ("trainer.default_local_dir",),
}
"""Arguments of the trainer that are settings of verl under another name."""
WORKER_RENAMED = {
    "--tensor_parallel_size": (f"{ROLLOUT}.tensor_model_parallel_size",),
    "--max_num_seqs": (f"{ROLLOUT}.max_num_seqs",),
    "--enable_prefix_caching": (f"{ROLLOUT}.enable_prefix_caching",),
    "--global_num_verifiers": ("reward.num_workers",),
}
LOST = {
    "--data_path": "verl reads parquet with a column prompt of messages; convert it, then data.train_files",
    "--insert_reasoning_phrases": "nothing here rewrites responses while they are generated",
    "--write_failed_generation_samples": "failed requests are in the log and the ledger",
    "--experience_batcher_name": "there is no actor of that kind; its part is in the trainer",
}
SHARDING: Mapping[str, dict[str, object]] = {
    "FULL_SHARD": {f"{ACTOR}.fsdp_config.reshard_after_forward": True},
    "SHARD_GRAD_OP": {f"{ACTOR}.fsdp_config.reshard_after_forward": False},
    "NO_SHARD": {f"{ACTOR}.fsdp_config.fsdp_size": 1},
}


def migrate(given: Given, plan: Plan) -> None:
    """Fill the plan from what was given."""
    plan.enable("grpo")
    trainer = [call for call in given.calls if call.program == TRAINER]
    workers = [call for call in given.calls if call.program == WORKER]
    if not trainer and not workers:
        plan.lose("the arguments", f"no call of {TRAINER} or {WORKER} was found")
    for path, value in FIXED.items():
        plan.set_verl(path, value, "in async-grpo's code")
    plan.option("grpo", "reference_every", REFERENCE_EVERY)
    plan.do_otherwise("the reference after 40 batches, in async-grpo's code", "reference_every in [grpo]")
    arguments = {name: Setting(name, value, "async-grpo's default") for name, value in DEFAULTS.items()}
    arguments |= {name: setting for call in trainer for name, setting in call.arguments.items()}
    _train(arguments, plan)
    for call in trainer:
        _launcher(call, plan)
    for call in workers:
        (_logprob if _mode(call) == "logprob" else _generation)(call.arguments, plan)
    plan.lose(
        "GPUs that generate",
        f"set {ROLLOUT}.nnodes and .n_gpus_per_node; async-grpo has one worker_dispatcher.py for each",
    )


def _train(arguments: Mapping[str, Setting], plan: Plan) -> None:
    handlers: dict[str, Callable[[Setting, Plan], None]] = {
        "--lr_scheduler": _scheduler,
        "--fsdp_sharding_strategy": _sharding,
        "--loss_chunksize": _chunks,
        "--constant_length_samples": _constant_length,
    }
    for name, setting in arguments.items():
        if name in RENAMED:
            _rename(setting, RENAMED[name], plan)
        elif name in handlers:
            handlers[name](setting, plan)
        elif name in LOST:
            plan.lose(setting, LOST[name])
        elif name != "--min_samples_per_checkpoint":
            plan.lose(setting, f"not an argument of {TRAINER}")
    _checkpoints(arguments, plan)
    if "--constant_length_samples" not in arguments:
        plan.set_verl(
            f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean", "each sample divided by its own length"
        )
    generated = arguments["--max_generation_tokens"]
    plan.do_otherwise(
        generated, "async-grpo takes the prompt off it; verl has data.max_prompt_length beside it"
    )


def _rename(setting: Setting, paths: tuple[str, ...], plan: Plan) -> None:
    if setting.is_open:
        plan.lose(setting, f"only a run of the script could tell the value; set {paths[0]}")
        return
    for path in paths:
        plan.set_verl(path, setting.value, f"was {setting.name}")


def _scheduler(setting: Setting, plan: Plan) -> None:
    kinds = {"constant_with_warmup": "constant", "constant": "constant", "cosine": "cosine"}
    if setting.value in kinds:
        plan.set_verl(f"{ACTOR}.optim.lr_scheduler_type", kinds[setting.value], f"was {setting.name}")
    else:
        plan.lose(setting, f"verl's actor knows constant and cosine, with {ACTOR}.optim.lr_warmup_steps")


def _sharding(setting: Setting, plan: Plan) -> None:
    for path, value in SHARDING.get(setting.value, {}).items():
        plan.set_verl(path, value, f"was {setting.name}")
    if setting.value not in SHARDING:
        plan.lose(setting, f"set {ACTOR}.fsdp_config.fsdp_size to the GPUs of a node")


def _chunks(setting: Setting, plan: Plan) -> None:
    if setting.value in ("None", "null"):
        return
    plan.set_verl(f"{MODEL}.use_fused_kernels", True, f"was {setting.name}")
    plan.option("grpo", "logprobs", True, setting)
    plan.do_otherwise(setting, "log-probabilities are computed in blocks, whose size is not a setting")


def _constant_length(setting: Setting, plan: Plan) -> None:
    if setting.value in ("None", "null"):
        plan.set_verl(
            f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean", "each sample divided by its own length"
        )
        return
    number = plan.number(setting, int)
    if number is not None:
        plan.set_verl(f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm", f"was {setting.name}")
        plan.set_verl(f"{ACTOR}.loss_scale_factor", number, f"was {setting.name}")


def _checkpoints(arguments: Mapping[str, Setting], plan: Plan) -> None:
    """Turn samples per checkpoint into steps per checkpoint."""
    names = ("--min_samples_per_checkpoint", "--batch_size", "--samples_per_question")
    between, batch, samples = (plan.number(arguments[name], int) for name in names)
    if None not in (between, batch, samples):
        steps = max(1, -(-between // (batch * samples)))
        plan.set_verl("trainer.save_freq", steps, f"{between} samples, was {names[0]}")


def _launcher(call: Call, plan: Plan) -> None:
    for name, path in {"--nproc_per_node": "trainer.n_gpus_per_node", "--nnodes": "trainer.nnodes"}.items():
        for spelt in (name, name.replace("_", "-")):
            if setting := call.launcher_arguments.get(spelt):
                _rename(setting, (path,), plan)


def _mode(call: Call) -> str:
    return call.arguments["--mode"].value if "--mode" in call.arguments else "generation"


def _generation(arguments: Mapping[str, Setting], plan: Plan) -> None:
    for name, setting in arguments.items():
        if name in WORKER_RENAMED:
            _rename(setting, WORKER_RENAMED[name], plan)
        elif name in LOST:
            plan.lose(setting, LOST[name])
        elif name not in ("--mode", "--model_path", "--overhead_seqs"):
            plan.lose(setting, f"not an argument of a generation worker of {WORKER}")
    running = arguments.get("--max_num_seqs", Setting("--max_num_seqs", "16", "async-grpo's default"))
    beyond = arguments.get("--overhead_seqs", Setting("--overhead_seqs", "8", "async-grpo's default"))
    numbers = [plan.number(setting, int) for setting in (running, beyond)]
    if None not in numbers:
        plan.option("grpo", "worker_requests", sum(numbers), beyond)


def _logprob(arguments: Mapping[str, Setting], plan: Plan) -> None:
    tokens = arguments.get(
        "--max_tokens_per_gpu", Setting("--max_tokens_per_gpu", "46000", "async-grpo's default")
    )
    _rename(tokens, (f"{REF}.log_prob_max_token_len_per_gpu",), plan)
    plan.set_verl(f"{REF}.log_prob_use_dynamic_bsz", True, "as the logprob workers do")
    plan.do_otherwise("GPUs of logprob workers", "the reference shares the trainer's devices in verl")
