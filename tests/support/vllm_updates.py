"""What the tests of weight updates share: the sending side of an update, and checkpoints in between.

Most of it runs in the engine's process; functions whose first argument is `worker` run on each rank."""

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, environment, models, quantized

Named = tuple[str, Any]  # name, tensor


OPEN_FROM = {
    **{"deepseek-v2": "0.29", "deepseek-v3": "0.29", "qwen3-next": "0.29", "gpt-oss": "0.25"},
    **{family: "0.27" for family in ("mamba2", "falcon-h1", "granite-moe-hybrid", "nemotron-h")},
}
"""Families that older builds of vLLM for CPUs fail to open or run, with the first version that does: MLA's prefill, the
state's dtype of gated delta rules, experts of a checkpoint in bf16; Mamba's convolution, which 0.24 has in Triton alone."""


def need(family: str) -> None:
    """Skip the test where the installed vLLM, as it comes, cannot open a model of `family`."""
    least = OPEN_FROM.get(family, "0")
    if version_of("vllm") < Version(least):
        pytest.skip(f"vLLM before {least} cannot open {family} on a CPU")


def checkpoint(family: str, seed: int, scheme: str | None = None, **config: Any) -> str:
    """The directory of a model of the laboratory, its linear layers in `scheme` if one is given."""
    directory = models.checkpoint(environment.store() / "models", family, seed, **config)
    return str(quantized.quantize(directory, scheme) if scheme else directory)


def mixture(base: str, *layers: tuple[str, str]) -> str:
    """A checkpoint like `base` in which tensors whose name holds `part` come from another: (part, directory)."""
    tensors = dict(models.weights(base))
    label = [Path(base).name]
    for part, source in layers:
        tensors.update((name, tensor) for name, tensor in models.weights(source) if part in name)
        label += [part.strip("."), Path(source).name]
    with models.making(Path(base).with_name("-".join(["mix", *label]))) as (target, work):
        if work is not None:
            models.write_changed(work, Path(base), tensors)
    return str(target)


def seed_of_the_day() -> int:
    """Another one every time, unless FLASHPATCH_LAB_SEED repeats one. It is printed: a failure must be repeatable."""
    seed = int(os.environ.get("FLASHPATCH_LAB_SEED") or time.time_ns() % 1_000_000)
    print(f"FLASHPATCH_LAB_SEED={seed}")
    return seed


def buckets(items: Sequence[Named], rng: random.Random) -> list[list[Named]]:
    """The items in random order, cut at random boundaries: each boundary is a cut with the same chance."""
    shuffled = rng.sample(items, len(items))
    chance = rng.choice((0.05, 0.2, 0.5, 1.0))
    cuts = [0, *(i for i in range(1, len(items)) if rng.random() < chance), len(items)]
    return [shuffled[start:end] for start, end in zip(cuts, cuts[1:])]


def finish(llm: Any) -> None:
    """What verl calls once after its buckets."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    runner = engines.inner_runner(llm)
    with set_current_vllm_config(runner.vllm_config):
        process_weights_after_loading(runner.model, runner.model_config, torch.device("cpu"))


def send(llm: Any, parts: Iterable[Iterable[Named]]) -> None:
    """Each bucket into the model of an in-process engine; nobody says when the update is complete."""
    for part in parts:
        engines.inner_model(llm).load_weights(iter(list(part)))


def sync(llm: Any, parts: Iterable[Iterable[Named]]) -> None:
    """Each bucket, in any order, between a begin and an end that are named."""
    from flashpatch.patches.fp8 import model_registry

    managed = model_registry.get(engines.inner_model(llm))
    managed.begin()
    send(llm, parts)
    managed.finish()


def failing(items: Sequence[Named], after: int) -> Iterator[Named]:
    """A sender whose connection breaks."""
    yield from items[:after]
    raise OSError("the sender's connection broke")


def error(action: Callable[[], object]) -> str | None:
    """ "Type: message" of what `action` raises, notes included; None when it does not."""
    try:
        action()
    except Exception as problem:
        return "\n".join([f"{type(problem).__name__}: {problem}", *getattr(problem, "__notes__", ())])
    return None


def refusal(llm: Any) -> str | None:
    """Why the engine does not generate, or None when it does."""
    return error(lambda: engines.greedy(llm, tokens=1))


def register_backend() -> None:
    """A weight-transfer backend that reads a part of a checkpoint, as one that receives it would."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import reload

    class Disk(WeightTransferEngine):
        init_info_cls = dataclasses.make_dataclass("Start", [])
        kind = ("update_kind", str, "dense")  # asked for by vLLM 0.24
        update_info_cls = dataclasses.make_dataclass("Part", ["path", "part", "parts", kind])

        def init_transfer_engine(self, init_info: Any) -> None:
            """There is no connection to open."""

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
            items = list(models.weights(update_info.path))
            start, end = (
                len(items) * p // update_info.parts for p in (update_info.part, update_info.part + 1)
            )
            self.model.load_weights(items[start:end])

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """There is no connection to close."""

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """There is no trainer. Before vLLM 0.28 an engine must have this method."""

    WeightTransferEngineFactory._registry["ipc"] = lambda: Disk  # names that are not vLLM's are refused


def with_cache_scales(model: str, seed: int) -> Path:
    """A compressed-tensors checkpoint that also brings scales for an fp8 KV cache, another for each seed."""
    import json

    import torch

    source = Path(model)
    with models.making(source.with_name(f"{source.name}-kv")) as (target, work):
        if work is not None:
            tensors = dict(models.weights(source))
            for layer in (0, 1):
                for number, key in enumerate(("k", "v")):
                    scale = torch.tensor([0.01 * (1 + seed + layer) + 0.003 * number])
                    tensors[f"model.layers.{layer}.self_attn.{key}_scale"] = scale
            models.write_changed(work, source, tensors)
            config = json.loads((work / "config.json").read_text())
            config["quantization_config"]["kv_cache_scheme"] = dict(
                num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True
            )
            (work / "config.json").write_text(json.dumps(config, indent=2))
    return target
