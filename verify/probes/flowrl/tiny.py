"""Build a tiny actor on verl's real worker, without Ray and rollouts, for the probe and tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor

WIDTH, VOCABULARY = 32, 64
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"

untrained, write_model = verl_actor.untrained, verl_actor.write_model


def recipe(model: Path, *overrides: str) -> Any:
    """Return verl's own config with the probes' settings and ``overrides``, validated as its driver does."""
    from verl.utils.config import validate_config

    config = verl_actor.configuration([*jobs.given()["actor"], f"{MODEL}.path={model}", *overrides])
    validate_config(config, False, False)
    return config


@dataclass(frozen=True)
class Response:
    """One prompt and one answer to it, as token ids, with logprobs per token of the answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    old: Sequence[float]
    ref: Sequence[float]
    reward: float


def responses(number: int = 8, seed: int = 0) -> list[Response]:
    """Return responses of different lengths to prompts of different lengths."""
    draw = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=draw))
        return torch.randint(1, VOCABULARY, (count,), generator=draw).tolist()

    made = []
    for _ in range(number):
        prompt, answer = ids(2, 9), ids(1, 7)
        old, ref = (torch.randn(2, len(answer), generator=draw, dtype=torch.float64) * 0.2 - 4.0).tolist()
        made.append(Response(prompt, answer, old, ref, float(torch.randn(1, generator=draw))))
    return made


def batch(rows: Sequence[Response], whole: int | None = None, **extra: Any) -> Any:
    """Return the TensorDict that verl's trainer sends to ``update_actor``, of this rank's ``rows`` of ``whole`` on all ranks.

    ``extra`` are further settings, or tensors as lists of one list of floats per response."""
    from verl.utils import tensordict_utils as tu

    def nested(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
        tensors = [torch.tensor(list(value), dtype=dtype) for value in values]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    ones = nested([[1] * len(row.answer) for row in rows], torch.long)
    tensors = {
        "input_ids": nested([[*row.prompt, *row.answer] for row in rows], torch.long),
        "position_ids": nested([range(len(row.prompt) + len(row.answer)) for row in rows], torch.long),
        "prompts": nested([row.prompt for row in rows], torch.long),
        "responses": nested([row.answer for row in rows], torch.long),
        "response_mask": ones,
        "loss_mask": ones.clone(),
        "old_log_probs": nested([row.old for row in rows], torch.float32),
        "ref_log_prob": nested([row.ref for row in rows], torch.float32),
        "advantages": nested([[row.reward] * len(row.answer) for row in rows], torch.float32),
    }
    for name in [name for name, value in extra.items() if isinstance(value, list)]:
        tensors[name] = nested(extra.pop(name), torch.float32)
    whole = whole or len(rows)
    settings = dict(global_batch_size=whole, mini_batch_size=whole, epochs=1, seed=1, temperature=1.0)
    settings |= dict(dataloader_kwargs={"shuffle": False}, calculate_entropy=False, **extra)
    return tu.get_tensordict(tensors, settings)


def worker(config: Any) -> Any:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(alone | os.environ)
    made = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    made.init_model()
    return made


def metrics(output: Any) -> dict[str, float]:
    """Return the metrics that the trainer logs of an update; of ranks that share a row, verl gives the first's."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    found = {} if output is None else reduce_metrics(dict(tu.get(output, "metrics")))
    return {name: float(value) for name, value in found.items()}


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Gather every weight of an engine on every rank: float32 copies by name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(engine.module, options=StateDictOptions(full_state_dict=True))
    return {name: value.detach().float().cpu().clone() for name, value in state.items()}
