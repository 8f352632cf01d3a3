"""Add the diversity of a step's responses to verl's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.diversity import measure
from flashpatch.record import Contract, Patch

TRAINER = "verl.trainer.ppo.v1.trainer_base"
FIELDS = ["responses", "rm_scores"]


def on_metrics(original, self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Add ``flowrl/diversity/*`` in ``PPOTrainer._compute_metrics``, of the step's first prompts.

    A response is right when its reward is above 0.
    """
    found = original(self, batch, metrics, *args, **kwargs)
    chosen = first_prompts(batch.keys, batch.tags, options.current().diversity_prompts)
    if chosen:
        metrics.update(measure(responses(chosen, batch.partition_id, self.tokenizer)))
    return found


def first_prompts(keys: Sequence[str], tags: Sequence[dict[str, Any]], number: int) -> list[str]:
    """Return the keys of the responses to the first ``number`` prompts; verl's keys begin with the prompt's id."""
    prompts = dict.fromkeys(
        _prompt(key) for key, tag in zip(keys, tags, strict=True) if not tag.get("is_padding")
    )
    wanted = set(list(prompts)[:number])
    return [
        key
        for key, tag in zip(keys, tags, strict=True)
        if _prompt(key) in wanted and not tag.get("is_padding")
    ]


def responses(keys: list[str], partition: str, tokenizer: Any) -> dict[str, list[tuple[str, bool]]]:
    """Fetch responses from verl's queue; return, by prompt, their texts and whether their reward is above 0."""
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=FIELDS)
    groups = defaultdict(list)
    for key, ids, scores in zip(keys, data["responses"].unbind(), data["rm_scores"].unbind(), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        groups[_prompt(key)].append((text, bool(scores.sum() > 0)))
    return dict(groups)


def _prompt(key: str) -> str:
    return key.split("_")[0]


PATCH = Patch(
    id="flowrl.verl.compute_metrics",
    targets=(f"{TRAINER}:PPOTrainer._compute_metrics",),
    wrapper=on_metrics,
    requires="verl>=0.9",
    evidence="optional",
    scope=frozenset({"driver"}),
    contract=Contract(
        params=("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
        mentions=("batch.tags", "batch.keys", "batch.partition_id", "compute_data_metrics"),
        exists=(f"{TRAINER}:PPOTrainer._init_tokenizer",),
    ),
    why="verl reports rewards and lengths, and nothing that tells whether right answers still differ.",
    how="After verl's metrics of a step, counts the different solutions among the responses to its first prompts.",
    remove_when="verl reports how many different solutions the responses to a prompt are.",
)
