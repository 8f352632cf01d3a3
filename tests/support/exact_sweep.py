"""A tiny model of each architecture that vLLM's registry and transformers both have, and what the certificate says of it."""

import contextlib
import functools
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_lab import models, scenario

_WIDTHS = (
    "head_dim sliding_window kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim mamba_d_head mamba_d_state"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts"
_INNER = "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size expert_ffn_hidden_size"
_ONES = "n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group decoder_sparse_step mamba_n_groups"
#: What any configuration gets that has an entry of that name.
SMALL: Mapping[str, int] = {
    **dict.fromkeys(_WIDTHS.split(), 64),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_INNER.split(), 128),
    **dict.fromkeys(_ONES.split(), 1),
    **dict(num_experts_per_tok=2, qk_rope_head_dim=32, mamba_n_heads=8, mamba_expand=2),
}
#: By model type, what it needs beside or in place of that.
OWN: Mapping[str, Mapping[str, Any]] = {
    "mamba2": dict(n_groups=1),  # of several Hugging Face normalizes all at once
    "falcon_h1": dict(
        **dict(ssm_in_multiplier=1.25, ssm_out_multiplier=0.5, ssm_multipliers=[0.9, 0.8, 0.7, 1.1, 0.6]),
        **dict(attention_in_multiplier=0.9, attention_out_multiplier=0.94, key_multiplier=0.4),
        **dict(lm_head_multiplier=0.3, embedding_multiplier=1.5, mlp_multipliers=[0.88, 0.58]),
    ),
    # Without its scoring vLLM takes another than Hugging Face; without YaRN its positions on a CPU are others.
    "deepseek_v3": dict(
        scoring_func="sigmoid",
        rope_scaling=dict(
            rope_type="yarn", factor=2.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=1.0
        ),
    ),
    "cohere2_moe": dict(tie_word_embeddings=True),
}
#: The architectures that differ on some vLLM, and the first place: why is in `docs/measured/exact.md`.
DIFFERS: Mapping[str, str] = {
    "Cohere2ForCausalLM": "into model.layers.0.self_attn.o_proj",
    "Ernie4_5_MoeForCausalLM": "model.layers.0.mlp",
    "Ministral3ForCausalLM": "into model.layers.0.self_attn.o_proj",
}


def architectures() -> dict[str, str]:
    """Return the architectures of vLLM's registry of text models that transformers has, each with its model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    found: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in _TEXT_GENERATION_MODELS and (name not in found or kind.endswith("_text")):
            found[name] = kind  # the text's own, not that of a model with images
    return dict(sorted(found.items()))


def checkpoint(root: Path, kind: str) -> Path:
    """Return a tiny model of a model type, as `models.checkpoint` writes those that it knows."""
    known = {**models.FAMILIES, **models.MORE}
    family = next((family for family, (of, _) in known.items() if of == kind), None)
    if family is None:
        own = {**_fitting(kind), **OWN.get(kind, {})}
        with mock.patch.dict(models.MORE, {kind: (kind, own)}):
            return models.checkpoint(root, kind)
    return models.checkpoint(root, family, **OWN.get(kind, {}))


def _fitting(kind: str) -> dict[str, Any]:
    from transformers import AutoConfig

    plain = AutoConfig.for_model(kind).to_dict()
    found: dict[str, Any] = {name: value for name, value in SMALL.items() if name in plain}
    for name, value in plain.items():
        if isinstance(value, list) and len(value) == plain.get("num_hidden_layers"):
            found[name] = [value[0], value[-1]]
    return found


@functools.cache
def _trainers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def certified(root: str, kind: str) -> dict[str, Any]:
    """Return the certificate of a model type, or why there is no such model; one process computes all trainers' models."""
    from flashpatch.verify.exact import command

    try:
        path = checkpoint(Path(root), kind)
    except Exception as error:
        return {"problem": f"transformers makes no tiny one: {' '.join(str(error).split())[:160]}"}
    shared = contextlib.nullcontext(_trainers())
    with mock.patch.object(command, "ProcessPoolExecutor", lambda *_: shared):
        return command.certify(str(path), "", {"kv_cache_memory_bytes": 16 << 20}).as_json()


def swept(root: Path) -> dict[str, dict[str, Any]]:
    """Return what is found of each architecture; of one that ended its interpreter, ``died``."""
    found, runner = {}, scenario.Runner()
    for name, kind in architectures().items():
        try:
            found[name] = runner(certified, str(root), kind)
        except scenario.ScenarioError as error:
            found[name] = {"died": str(error)[-2000:], "problem": "the engine ended its process"}
        if found[name]["problem"]:  # vLLM leaves more behind than torch's default dtype
            runner.close()
    runner.close()
    return found
