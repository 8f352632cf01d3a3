"""LoRA adapters of tiny models: folders as PEFT writes them, and engines asked under them.

Functions that open engines run in a `scenario.Runner`; `fresh` in the oracle's, without FlashPatch."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from installed import version_of
from packaging.version import Version
from vllm_lab import engines, environment, models, oracle

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ENGINE = dict(enable_lora=True, max_loras=1, max_lora_rank=8)
RANK, ALPHA = 4, 12

Tensors = dict[str, Any]


def tensors(model: str, seed: int, targets: Sequence[str] = TARGETS) -> Tensors:
    """lora_A and lora_B in bf16 of every linear layer named in `targets`, by PEFT's names; none is zero."""
    import torch

    random, found = torch.Generator().manual_seed(seed), {}
    for name, weight in models.weights(model):
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = weight.shape
        for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(shape, generator=random) * 0.3 / shape[1] ** 0.5
            found[f"base_model.model.{module}.lora_{part}.weight"] = values.bfloat16()
    return found


def config(**changed: Any) -> dict[str, Any]:
    """PEFT's configuration of an adapter."""
    plain = dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), bias="none")
    return {**plain, "task_type": "CAUSAL_LM", **changed}


def write(folder: Path | str, found: Tensors, **changed: Any) -> str:
    """An adapter's folder; an old one is overwritten, as a trainer that keeps one path does."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(**changed)))
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()}, folder / "adapter_model.safetensors"
    )
    return str(folder)


def adapter(model: str, seed: int) -> str:
    """The folder of a good adapter, kept in the laboratory's store."""
    folder = environment.store() / "adapters" / f"{Path(model).name}-{seed}"
    if not (folder / "adapter_model.safetensors").exists():
        write(folder, tensors(model, seed))
    return str(folder)


def merged(model: str, seed: int) -> str:
    """A checkpoint with the adapter's product added to its weights, in float32, then rounded to bf16."""
    source, parts = Path(model), tensors(model, seed)
    with models.making(source.with_name(f"{source.name}-merged-{seed}")) as (target, work):
        if work is not None:
            weights = dict(models.weights(model))
            for name, weight in weights.items():
                a = parts.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
                if a is not None:
                    b = parts[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
                    weights[name] = (weight.float() + ALPHA / RANK * b.float() @ a.float()).bfloat16()
            models.write_changed(work, source, weights)
    return str(target)


def request(folder: str, name: str = "policy", number: int = 1, replace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder, load_inplace=replace)


def base(model: str) -> list[tuple[str, Any]]:
    """A checkpoint's tensors by the names that the base of an engine with adapters loads.

    vLLM 0.24 knows a layer with adapters as ``base_layer`` alone, and verl names it so."""
    items = models.weights(model)
    if version_of("vllm") >= Version("0.27"):
        return list(items)
    wrapped = re.compile(rf"({'|'.join(TARGETS)})\.")
    return [(wrapped.sub(r"\1.base_layer.", name), tensor) for name, tensor in items]


def send(llm: Any, folder: str, **how: Any) -> None:
    """Add an adapter, in place of the one that has its number."""
    llm.llm_engine.add_lora(request(folder, replace=True, **how))


@contextlib.contextmanager
def under(asked: Any) -> Iterator[None]:
    """Within, `engines.answers` and `engines.greedy` ask under an adapter."""
    plain = engines._generate

    def generate(llm: Any, tokens: int, **sampling: Any) -> list[Any]:
        inner = llm.generate
        llm.generate = lambda *args, **kw: inner(*args, lora_request=asked, **kw)
        try:
            return plain(llm, tokens, **sampling)
        finally:
            del llm.generate

    engines._generate = generate
    try:
        yield
    finally:
        engines._generate = plain


def ask(llm: Any, folder: str, **named: Any) -> Any:
    """`engines.answers` under the adapter of `folder`."""
    with under(request(folder, **named)):
        return engines.answers(llm)


def fresh(model: str, folder: str | None = None, **kw: Any) -> dict[str, Any]:
    """What an engine without FlashPatch says that was opened on `model` and has had this adapter alone."""
    return oracle._runner({})(_fresh, model, folder, **kw)


def _fresh(model: str, folder: str | None, **kw: Any) -> dict[str, Any]:
    import torch
    from vllm.lora.layers import base_linear

    # Stock vLLM on a CPU asks an int8 layer for the device of a weight that its kernel has packed away.
    base_linear._get_lora_device = lambda layer: torch.device("cpu")
    with engines.open_llm(model, **ENGINE, **kw) as llm:
        return engines.answers(llm) if folder is None else ask(llm, folder)
