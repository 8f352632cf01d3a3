"""A GRPO run of TRL with vLLM in its own process: what it trains with, and what it says of itself.

Runs in a process of `vllm_lab.scenario`; results are JSON data."""

import functools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm_updates as updates
from vllm_lab import engines

PROMPTS = ("t1 t2 t3", "t4 t5 t6 t7")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The mean token id, as a share of the vocabulary: a sampled batch always has several."""
    return [sum(ids) / len(ids) / 512 for ids in completion_ids]


def grpo(model: str, folder: str, **settings: Any) -> Any:
    """A ``GRPOTrainer`` on a checkpoint of the laboratory, its engine colocated; ``settings`` of ``GRPOConfig``."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    config = GRPOConfig(
        **{
            **dict(
                output_dir=folder,
                max_steps=3,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=256,
                learning_rate=1e-3,
                report_to="tensorboard",
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                gradient_checkpointing=False,
            ),
            **settings,
        }
    )
    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * 4}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
    )


def train(model: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Train, sync once more, and ask the engine everything; the trainer's weights go to ``folder``/final."""
    trainer = grpo(model, folder, **settings)
    try:
        trainer.train()
        trainer.vllm_generation.sync_weights()
    except Exception:
        return dict(error=traceback.format_exc())
    trainer.model.bfloat16()  # as an engine in bfloat16 takes float32 in, before it rounds to 8 bits
    trainer.save_model(f"{folder}/final")
    llm = trainer.vllm_generation.llm
    llm.llm_engine.model_config.max_logprobs = -1  # TRL opens it with vLLM's default, 20
    return dict(
        error=None,
        answers=engines.answers(llm),
        precision=llm.llm_engine.model_config.quantization,
        history=trainer.state.log_history,
        tracked=tracked(folder),
    )


def without_a_parameter(model: str, folder: str, name: str) -> dict[str, Any]:
    """A trainer whose walk over its parameters passes one over, as with a prefix that it does not know."""
    trainer = grpo(model, folder)
    walk = trainer.vllm_generation._iter_named_params

    def some() -> Iterator[tuple[str, Any]]:
        return ((found, tensor) for found, tensor in walk() if found != name)

    trainer.vllm_generation._iter_named_params = some
    try:
        trainer.train()
    except Exception:
        return dict(error=traceback.format_exc(), step=trainer.state.global_step)
    return dict(error=None, step=trainer.state.global_step)


def failing_syncs(model: str, folder: str, victim: str) -> dict[str, list[Any]]:
    """Syncs that bring NaN in a parameter, leave it out, or break off, each before an ordinary one: error, refusal, error, answers."""
    generation = grpo(model, folder).vllm_generation
    walk, llm = generation._iter_named_params, generation.llm
    llm.llm_engine.model_config.max_logprobs = -1

    def bad(fault: str) -> Iterator[tuple[str, Any]]:
        for name, tensor in walk():
            if name != victim:
                yield name, tensor
            elif fault == "nan":
                yield name, tensor * float("nan")
            elif fault == "dies":
                raise OSError("the walk broke off")

    found: dict[str, list[Any]] = {}
    for fault in ("nan", "missing", "dies"):
        generation._iter_named_params = functools.partial(bad, fault)
        found[fault] = [updates.error(generation.sync_weights), updates.refusal(llm)]
        del generation._iter_named_params
        found[fault] += [updates.error(generation.sync_weights), engines.answers(llm)]
    return found


def tracked(folder: str) -> dict[str, list[float]]:
    """Name to values, in order, of all that TensorBoard's files below a folder hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for directory in sorted({path.parent for path in Path(folder).rglob("events.out.tfevents*")}):
        events = EventAccumulator(str(directory)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(event.value for event in events.Scalars(name))
    return found
