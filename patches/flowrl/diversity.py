"""Count how many different solutions the responses to a prompt are, without a judge, and report it among a step's metrics.

The paper (arXiv 2509.15207, section 5) asks a language model how different solutions are. Here two responses are the
same solution when they are equal after normalisation, or share most of their runs of three words."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashpatch.decorate import Patches

TRAINER = "verl.trainer.ppo.v1.trainer_base"
FIELDS = ["responses", "rm_scores"]
PROMPTS = 32
"""Prompts of a step whose responses are compared."""

SAME = 0.8
"""Two responses are one solution when they share this part of all their runs of three words (Jaccard index)."""

_DROPPED = re.compile(r"[^\w+\-*/=<>^.]+")
_AROUND_OPERATORS = re.compile(r" ?([+\-*/=<>^]) ?")


@Patches(
    "flowrl",
    "verl>=0.9",
    scope="driver",
    evidence="optional",
    why="verl reports rewards and lengths, and nothing that tells whether right answers still differ.",
    remove_when="verl reports how many different solutions the responses to a prompt are.",
).wrap(
    f"{TRAINER}:PPOTrainer._compute_metrics",
    relies_on=(
        "batch.tags",
        "batch.keys",
        "batch.partition_id",
        "compute_data_metrics",
        f"{TRAINER}:PPOTrainer._init_tokenizer",
    ),
    params=("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
)
def compute_metrics(original, self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Count the different solutions among the responses to a step's first prompts, after verl's metrics of the step.

    A response is right when its reward is above 0."""
    found = original(self, batch, metrics, *args, **kwargs)
    chosen = first_prompts(batch.keys, batch.tags, PROMPTS)
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


def normalize(text: str) -> str:
    """Return a response in lower case: words and numbers with one space between them, operators without."""
    return _AROUND_OPERATORS.sub(r"\1", _DROPPED.sub(" ", text.casefold())).strip(" .")


def solutions(responses: Iterable[str]) -> list[int]:
    """Return how many responses each different solution has, in the order in which the solutions appear.

    A response joins the first solution whose first response it resembles."""
    counts: dict[str, int] = {}
    for text in map(normalize, responses):
        counts[text] = counts.get(text, 0) + 1
    found: list[tuple[frozenset[tuple[str, ...]], int]] = []
    for text, count in counts.items():
        words = text.split()
        runs = frozenset(zip(words, words[1:], words[2:], strict=False))
        for at, (first, sofar) in enumerate(found):
            if runs and len(runs & first) >= SAME * len(runs | first):
                found[at] = first, sofar + count
                break
        else:
            found.append((runs, count))
    return [count for _, count in found]


def effective(counts: Sequence[int]) -> float:
    """Return the number of equally frequent solutions with the same entropy; 0 for none."""
    total = sum(counts)
    return math.exp(-sum(count / total * math.log(count / total) for count in counts)) if total else 0.0


def measure(groups: Mapping[str, Sequence[tuple[str, bool]]]) -> dict[str, float]:
    """Return metrics of the responses to some prompts.

    Args:
        groups: by prompt, each response and whether it is right.

    Returns:
        ``flowrl/diversity/solutions``, different solutions per prompt, and of those prompts that have a right
        response ``flowrl/diversity/right_solutions``, different ones among the right, and
        ``flowrl/diversity/effective_right_solutions``, their `effective` number. Means over prompts; the last two
        are missing if no prompt has a right response."""
    every = [len(solutions(text for text, _ in group)) for group in groups.values() if group]
    right = [solutions(text for text, ok in group if ok) for group in groups.values()]
    right = [counts for counts in right if counts]
    means = {
        "solutions": every,
        "right_solutions": [len(counts) for counts in right],
        "effective_right_solutions": [effective(counts) for counts in right],
    }
    return {f"flowrl/diversity/{name}": sum(values) / len(values) for name, values in means.items() if values}
