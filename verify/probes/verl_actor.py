"""Tiny models, and verl's own FSDP engines around them, for probes of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs


def on_cpu(*names: str) -> None:
    """Switch names on, such as family cpu, in a process that has no accelerator."""
    import flashpatch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        flashpatch.enable(*names)


def configuration(overrides: list[str], name: str = "ppo_trainer", folder: str = "config") -> Any:
    """Return the config of verl's trainer, or another of a folder, which may be relative to the trainer's."""
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / folder), version_base=None):
        return compose(name, overrides)


def refusal(recipe: dict[str, Any]) -> str:
    """Return the error with which verl's config validation refuses a recipe; empty if it does not."""
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    from flashpatch.errors import PatchError

    try:
        validate_config(OmegaConf.create(recipe), False, False)
    except PatchError as error:
        return str(error)
    return ""


def untrained(**settings: Any) -> Any:
    """Return a new Qwen2 of two layers; ``settings`` are others of its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    others = dict(max_position_embeddings=256, tie_word_embeddings=False)
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **others, **settings}))


def write_model(
    folder: Path, seed: int = 0, std: float = 0.2, dtype: str = "float32", norms: float = 0.0, **settings: Any
) -> Path:
    """Write a Qwen2 of random weights, those of norms around ``norms``, in Hugging Face's format; ``settings`` as for
    `untrained`."""
    torch.manual_seed(seed)
    model = untrained(**settings).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(norms if "norm" in name else 0.0, std)
    model.save_pretrained(folder)
    return folder


def engine(strategy: str, model: Path, rate: float, lora_rank: int = 0, **settings: Any) -> Any:
    """Return verl's FSDP engine ("fsdp" or "fsdp2") around the model in a folder, initialized: in float32, with plain gradient
    descent; ``settings`` are others of FSDP."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    known = jobs.given()
    made = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(path=str(model), lora_rank=lora_rank, **known["model"]),
        engine_config=FSDPEngineConfig(strategy=strategy, **{**known["fsdp"], **settings}),
        optimizer_config=FSDPOptimizerConfig(lr=rate, **known["optimizer"]),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made
