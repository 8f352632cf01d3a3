"""One streamed step on what verl's trainer really sends, for each kind of model, against one backward of the whole batch in float64."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from stream_rounds import settings
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from flashpatch.patches.grpo.streaming import rounds, worker
from flashpatch.verify.probes.grpo import job

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # verl's worker reads them
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
KEYS = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
LAYERS = dict(layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1])
SHORT = dict(conv_L_cache=3, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"])
STATE = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, head_dim=8)
BY_KIND = {
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    "full_attention": dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
}
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)
KINDS = {
    "attention": ("qwen2", {}),
    "window": ("mistral", dict(sliding_window=4)),
    "experts": ("qwen3_moe", EXPERTS),
    "convolution": ("lfm2", SHORT),
    "delta": ("qwen3_next", {**EXPERTS, **KEYS, **LAYERS, "shared_expert_intermediate_size": 16}),
    "mamba": ("falcon_h1", STATE),
    "ministral": ("ministral3", dict(head_dim=8, sliding_window=None, max_position_embeddings=256)),
    "window in the mask": (
        "qwen2_moe",
        {**EXPERTS, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "lightning": ("minimax", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, block_size=8)),
    "longrope": ("phi3", dict(rope_scaling=LONG, pad_token_id=0, original_max_position_embeddings=16)),
    "dynamic": ("gemma3_text", dict(head_dim=8, rope_parameters=BY_KIND, layer_types=[*BY_KIND])),
    "own mask": ("doge", dict(keep_window_size=4)),
    "opt": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=256)),
    "falcon": ("falcon", dict(alibi=False, new_decoder_architecture=False)),
    "softcap": ("gemma2", dict(head_dim=8)),
    "chunks": (
        "llama4_text",
        dict(
            attention_chunk_size=10,
            intermediate_size_mlp=48,
            head_dim=8,
            num_local_experts=2,
            use_qk_norm=False,
        ),
    ),
    "persimmon": ("persimmon", dict(num_key_value_heads=4, qk_layernorm=False)),
}
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
AGGREGATION = "seq-mean-token-mean"


def write(folder: Path, kind: str) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """Write a random model of that kind; return a batch, on policy, and its gradient by one backward in float64."""
    torch.manual_seed(0)
    name, own = KINDS[kind]
    config = transformers.AutoConfig.for_model(name, **{**SMALL, "num_key_value_heads": 2, **own})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder / kind)
    how = dict(dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, **how)
    batch = job.rows(plain)
    for row in batch:
        row["old_log_probs"] = job.own_logprobs(plain, row["input_ids"], len(row["responses"])).detach()
    return batch, job.wanted(plain, batch, AGGREGATION)


def training(model: Path, packed: bool = False, fused: bool = False, **engine: Any) -> Any:
    """Return verl's own training worker, which tells its engine what the configuration says; ``engine``: settings of FSDP."""
    plain = dict(load_tokenizer=False, enable_gradient_checkpointing=False)
    kernels = dict(use_fused_kernels=fused, fused_kernel_options={"impl_backend": "torch"})
    attention = dict(use_remove_padding=packed, override_config={"attn_implementation": "sdpa"})
    fsdp = dict(strategy="fsdp", use_orig_params=True, use_torch_compile=False, model_dtype="fp32")
    sgd = dict(lr=1.0, optimizer="SGD", weight_decay=0.0, clip_grad=1e9, total_training_steps=10)
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(model), **plain, **kernels, **attention),
        engine_config=FSDPEngineConfig(**{**fsdp, "mixed_precision": FULL, **engine}),
        optimizer_config=FSDPOptimizerConfig(**sgd),
        checkpoint_config=CheckpointConfig(),
    )
    made = TrainingWorker(config)
    made.reset()
    made.set_loss_fn(partial(ppo_loss, config=settings("grpo_exact", AGGREGATION)))
    return made


def step(model: Path, batch: Any, wanted: torch.Tensor, packed: bool, fused: bool) -> dict[str, float]:
    """Return how far a step of several rounds, as `Rounds` sends them, is from the whole batch's values."""
    sent: list[Any] = []
    ranks = {"actor": [0], "ref": [0]}
    workers = SimpleNamespace(_dispatch_info=ranks, stream_accumulate=lambda some: sent.extend(some) or [])
    fields = {"temperature": 1.0, "calculate_entropy": True, "compute_loss": False, worker.CORRECTION: None}
    sender = rounds.Rounds(workers, workers, 24, fields)
    for key, row in enumerate(batch):
        for one in sender.packer.add((str(key), {}), len(row["input_ids"])):
            sender._launch(one)
    sender._flush()
    actor, away = settings("grpo_exact", AGGREGATION), {"policy": 0.0, "reference": 0.0}
    policy, reference = training(model, packed, fused), training(model, packed, fused, forward_only=True)
    worker._of_this_process["ref"] = SimpleNamespace(ref=reference)
    open_ = worker._OpenStep(SimpleNamespace(config=SimpleNamespace(actor=actor), actor=policy), None)
    for share in sent:
        rows = [batch[int(key)] for key in share.keys]
        data = job.share(rows, len(rows), {}).select(*batch[0].keys() - {"old_log_probs"})
        tu.assign_non_tensor(data, **share.extra_info)
        found = open_.add(data)
        both = zip(rows, found["log_probs"].unbind(), found["ref_log_prob"].unbind(), strict=True)
        for row, logs, of_reference in both:
            of_policy = logs[-len(row["responses"]) - 1 : -1]
            for name, values in ("policy", of_policy), ("reference", of_reference):
                away[name] = max(float((values - row["old_log_probs"]).abs().max()), away[name])
    open_.step.finish()
    gradient = job._whole(open_.engine)
    open_.close()
    return {**away, "gradient": float((gradient - wanted).norm() / wanted.norm())}


def shared(model: Path, batch: Any, wanted: torch.Tensor, ranks: int = 2) -> float:
    """Return how far the gradient of verl's update is whose ranks share each packed row (Ulysses)."""
    made = training(model, packed=True, ulysses_sequence_parallel_size=ranks)
    data = job.share(batch, len(batch), {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(batch)})
    tu.assign_non_tensor(data, use_remove_padding=True)
    found = job.gradient(made.engine, data, made.loss_fn)
    return float((found - wanted).norm() / wanted.norm())


def filled(forward_only: bool) -> set[str]:
    """Return the names that `worker.fill` adds to an empty batch."""
    engine = SimpleNamespace(model_config={}, engine_config=FSDPEngineConfig(forward_only=forward_only))
    data = TensorDict({}, batch_size=1)
    worker.fill(engine, data)
    return {*data.keys()}
