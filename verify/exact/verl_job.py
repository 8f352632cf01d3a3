"""Read from a job of verl its trainer's model and the engine that its rollouts open."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Get = Callable[..., Any]
"""``get(path, default=None)``: read one setting."""

ROLLOUT, MODEL, ACTOR = (f"actor_rollout_ref.{part}" for part in ("rollout", "model", "actor"))
BATCHING = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
TAKEN = ("dtype", *BATCHING, "gpu_memory_utilization")
"""Settings of a rollout that are arguments of `vllm.LLM` by the same name."""
CONFIGS = tuple(f"{kind}_config" for kind in ("compilation", "speculative", "kv_transfer"))
NOT_TAKEN = ("load_format", "custom_weight_loader", *CONFIGS)
"""Arguments of engines that are left out: the first is verl's "dummy", as its trainer sends the weights."""
PARALLEL = tuple(f"{kind}_parallel_size" for kind in ("pipeline_model", "data", "expert"))

ULYSSES = tuple(f"{ACTOR}.{at}ulysses_sequence_parallel_size" for at in ("fsdp_config.", ""))
"""verl takes either."""


@dataclass(frozen=True)
class Trainer:
    """What else a trainer's probabilities depend on: which tokens its rollouts may draw (1 and -1: all)."""

    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Job:
    """What is to be compared: the trainer's model, by path or name, and an engine with these arguments.

    Attributes:
        left_out: what the job's engine does and the compared one does not.
        problem: why nothing can be compared, "" if it can.
        kind: the package whose engine it is, "" for any.
        config: path or name of the trainer's config.json, "" if it is the model's.
        overrides: what the trainer's config has otherwise."""

    model: str
    engine: dict[str, Any]
    left_out: tuple[str, ...] = ()
    problem: str = ""
    kind: str = ""
    trainer: Trainer = Trainer()
    config: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def trainers_model(self) -> Iterator[str]:
        """Yield the path or name of the trainer's model; where its config is another, that of a folder that ends with the
        block.

        Raises JobError if verl does not build such a config either."""
        if not (self.config or self.overrides):
            yield self.model
            return
        from transformers import AutoConfig

        trusted = bool(self.engine.get("trust_remote_code"))
        try:
            config = AutoConfig.from_pretrained(self.config or self.model, trust_remote_code=trusted)
            _override(config, self.overrides)
        except (AttributeError, KeyError, ValueError) as error:
            raise JobError(f"verl does not take this {MODEL}.override_config: {error}") from error
        with tempfile.TemporaryDirectory() as folder:
            for file in Path(self.model).iterdir():
                if file.name != "config.json":
                    Path(folder, file.name).symlink_to(file.resolve())
            config.to_json_file(Path(folder, "config.json"))
            yield folder


def _override(config: Any, changes: Mapping[str, Any]) -> None:
    """Set what differs, as verl does: entries of a part that is no object of its own are an error there too."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            _override(getattr(config, name), value)
        else:
            setattr(config, name, value)


class JobError(ValueError):
    """Say which arguments of a job verl does not take."""


def read(get: Get) -> Job:
    """Return what a job compares; ``get(path, default)`` reads its configuration."""
    kind = get(f"{ROLLOUT}.name")
    taken = TAKEN if kind == "vllm" else ("dtype",)  # the others are for SGLang's scheduler and its memory
    engine = {name: get(f"{ROLLOUT}.{name}") for name in taken}
    engine["trust_remote_code"] = get(f"{MODEL}.trust_remote_code")
    ranks = get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    if kind == "vllm" and ranks > 1:
        engine["tensor_parallel_size"] = ranks
    own = get(f"{ROLLOUT}.engine_kwargs.{kind}") or {}
    engine.update((name, value) for name, value in own.items() if name not in NOT_TAKEN)
    given = {name: value for name, value in engine.items() if value is not None}
    # Without one, that of the model, as under verl, which never gives SGLang one.
    length = {"max_model_len": get(f"{ROLLOUT}.max_model_len")}
    given.update(length if kind == "vllm" else {"context_length": None})
    model, config = str(get(f"{MODEL}.path")), get(f"{MODEL}.hf_config_path") or ""
    own = get(f"{MODEL}.override_config") or {}
    # Of attention one kind is compared, whichever the trainer has.
    overrides = {**own.get("model_config", own)}
    overrides.pop("attn_implementation", None)
    quantization, problem = get(f"{ROLLOUT}.quantization"), ""
    if kind not in ("vllm", "sglang"):
        problem = f"cannot compare here: {ROLLOUT}.name={kind}, and only vLLM and SGLang are compared"
    elif quantization:
        problem = f"cannot compare here: {ROLLOUT}.quantization={quantization} is loaded by verl's own code"
    if config or overrides:
        given["model" if kind == "vllm" else "model_path"] = model
        if not Path(model).is_dir():
            name = "override_config" if overrides else "hf_config_path"
            alone = f"{MODEL}.{name} changes the trainer's config alone, which is followed"
            problem = problem or f"cannot compare here: {alone} if {MODEL}.path is a folder"
    trainer = Trainer(get(f"{ROLLOUT}.top_p", 1.0), get(f"{ROLLOUT}.top_k", -1))
    return Job(model, given, tuple(_left_out(get)), problem, kind, trainer, config, overrides)


def composed(arguments: Sequence[str]) -> Job:
    """Return what the job with these arguments compares: those of verl's ``main_ppo``.

    Raises ImportError if verl is not installed, JobError if its configuration does not take them."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from flashpatch.verify.probes import verl_actor

    parser = argparse.ArgumentParser("verl.trainer.main_ppo", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    parser.add_argument("--config-path", "-cp", default="config")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(list(arguments))
    try:
        config = verl_actor.configuration(given.overrides, given.config_name, given.config_path)
    except HydraException as error:
        raise JobError(f"verl does not take this: {error}") from error

    def get(path: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, path, default=default)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    return read(get)


def _left_out(get: Get) -> Iterator[str]:
    split = PARALLEL if get(f"{ROLLOUT}.name") == "vllm" else ("tensor_model_parallel_size", *PARALLEL)
    for path in (*(f"{ROLLOUT}.{name}" for name in split), *ULYSSES):
        size = get(path, 1)
        if size and size > 1:
            yield f"{path}={size} (is compared without)"
    if not get(f"{ROLLOUT}.enforce_eager"):
        more = "; --causes compiles them" if get(f"{ROLLOUT}.name") == "vllm" else ""
        yield f"{ROLLOUT}.enforce_eager=False (captured graphs hide modules{more})"
    trained = get(f"{MODEL}.lora_adapter_path")
    if trained:
        yield f"{MODEL}.lora_adapter_path={trained} (the base is compared without it)"
    for name in ("lora_rank", "lora.rank"):
        if get(f"{MODEL}.{name}") and not trained and not get(f"{MODEL}.lora.merge"):
            yield f"{MODEL}.{name}={get(f'{MODEL}.{name}')} (a new adapter changes nothing: its base is compared)"
    for name in ("mtp.enable_rollout", "engine_kwargs.vllm.speculative_config"):
        if get(f"{ROLLOUT}.{name}"):
            yield f"{ROLLOUT}.{name} (drafts are accepted or not, the target's numbers are compared)"
