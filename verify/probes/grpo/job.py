"""Run one of the probe's ranks as a trainer: gradients of one batch through verl's own FSDP engines, split in several ways.

Each is compared with one backward of the plain model over the whole batch, whose loss is written out here, without this
family's code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor
from flashpatch.verify.probes.grpo import servers
from flashpatch.verify.probes.grpo.probe import OTHER_LOSSES

ROWS, REAL, VOCABULARY = 8, 5, 64
"""Rows of the batch, and how many of them have an output: the others are padding, or were rejected."""

SPLITS = {
    "one sample at a time": dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=1),
    "all at once": dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=ROWS),
    "by token budget": dict(use_dynamic_bsz=True, max_token_len_per_gpu=24),
}
AGGREGATIONS = ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean")


def tiny(folder: Path) -> Path:
    """Write a random Qwen2 without tokenizer, as a Hugging Face checkpoint."""
    return verl_actor.write_model(folder, std=0.1, norms=1.0, max_position_embeddings=64)


def rows(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return the whole batch: prompts and responses of different lengths, slightly off-policy; the last rows have
    an empty response mask."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for row in range(ROWS):
        prompt, length = 2 + row % 3, 3 + (5 * row) % 8
        ids = torch.randint(0, VOCABULARY, (prompt + length,), generator=draw)
        with torch.no_grad():
            new = own_logprobs(model, ids, length)
        found.append(
            {
                "prompts": ids[:prompt],
                "responses": ids[prompt:],
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)),
                "response_mask": torch.full((length,), int(row < REAL)),
                "loss_mask": torch.ones(length, dtype=torch.int64),
                "old_log_probs": new + 0.05 * torch.randn(length, generator=draw),
                "advantages": torch.full((length,), float(torch.randn(1, generator=draw))),
            }
        )
    return found


def own_logprobs(model: torch.nn.Module, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return log-probabilities of the last ``length`` tokens, from the whole logits."""
    logs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), -1)
    return logs[:-1].gather(-1, ids[1:, None])[-length:, 0]


def wanted(model: torch.nn.Module, batch: list[dict[str, torch.Tensor]], aggregation: str) -> torch.Tensor:
    """Return the gradient of the whole batch at once, flat, from formulas written out."""
    model.zero_grad()
    real = batch[:REAL]
    tokens = sum(len(row["responses"]) for row in real)
    total: Any = 0.0
    for row in real:
        length, gain = len(row["responses"]), row["advantages"]
        ratio = (own_logprobs(model, row["input_ids"], length) - row["old_log_probs"]).exp()
        losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).sum()
        divisor = {"seq-mean-token-mean": REAL * length, "seq-mean-token-sum": REAL, "token-mean": tokens}
        total = total + losses / divisor[aggregation]
    total.backward()
    return torch.cat([parameter.grad.flatten() for _, parameter in sorted(model.named_parameters())])


def engine_for(strategy: str, model: Path, **settings: Any) -> Any:
    """Return verl's engine of that name around the model, with further settings of FSDP."""
    return verl_actor.engine(strategy, model, rate=1.0, **{"use_orig_params": True, **settings})


def loss_function(mode: str, aggregation: str) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    own = dict(loss_agg_mode=aggregation, policy_loss=PolicyLossConfig(loss_mode=mode))
    return partial(ppo_loss, config=FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, **own))


def share(batch: list[dict[str, torch.Tensor]], configured: int, split: dict[str, Any]) -> Any:
    """Return rows as verl's trainer passes them to one rank's engine."""
    from verl.utils import tensordict_utils as tu

    jagged = {
        name: torch.nested.nested_tensor([row[name] for row in batch], layout=torch.jagged)
        for name in batch[0]
    }
    settings = dict(use_remove_padding=False, temperature=1.0, global_batch_size=configured, pad_token_id=0)
    return tu.get_tensordict(jagged, {**settings, **split})


def gradient(engine: Any, data: Any, loss: Any) -> torch.Tensor:
    """Return the gradient that the engine's backward leaves in the parameters of all ranks, flat, as in `wanted`."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss)
        return _whole(engine)


def streamed(
    engine: Any, batch: list[dict[str, torch.Tensor]], rank: int, world: int, aggregation: str
) -> tuple[torch.Tensor, int]:
    """Return the same gradient for rows that arrive one by one and are packed in rounds; and the number of rounds."""
    from flashpatch.patches.grpo.streaming.divisor import Divisor
    from flashpatch.patches.grpo.streaming.packing import Packer
    from flashpatch.patches.grpo.streaming.step import StreamedStep

    packer = Packer(world, budget=16)
    order = 6, 2, 0, 7, 4, 1, 5, 3
    rounds = [one for row in order for one in packer.add(row, len(batch[row]["input_ids"]))]
    rounds += [last for last in [packer.flush()] if last is not None]
    with engine.train_mode():
        engine.optimizer_zero_grad()
        step = StreamedStep(engine, Divisor.of(aggregation))
        for one in rounds:
            mine = [batch[row] for row in one[rank].samples]
            if one[rank].filler:
                mine = [{**row, "response_mask": row["response_mask"] * 0} for row in mine]
            split = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(mine)}
            step.add(share(mine, len(mine), split), loss_function("grpo_exact", aggregation))
        step.finish()
        return _whole(engine), len(rounds)


def _whole(engine: Any) -> torch.Tensor:
    """Return the gradient in the parameters of all ranks, flat."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(engine.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(engine.module, with_grads=True):
            found = {name: one.grad.clone() for name, one in engine.module.named_parameters()}
    else:
        found = {name: one.grad.full_tensor() for name, one in engine.module.named_parameters()}
    plain = {name.replace("_fsdp_wrapped_module.", ""): one for name, one in found.items()}
    return torch.cat([one.flatten() for _, one in sorted(plain.items())])


def compare(strategy: str, model: Path, rank: int, world: int) -> Iterator[tuple[str, float]]:
    """Yield each split, and the distance of its gradient from the whole batch's, relative to the latter's norm."""
    from transformers import Qwen2ForCausalLM

    import flashpatch

    plain = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    batch = rows(plain)
    engine = engine_for(strategy, model)

    def shared(split: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Return this rank's rows; where verl equalizes the number of micro-batches, only the first rank has real ones."""
        if split["use_dynamic_bsz"] and world > 1:
            return [batch[:REAL], batch[REAL:]][rank] if rank < 2 else []
        return batch[rank::world]

    def away(mode: str, aggregation: str, split: dict[str, Any]) -> float:
        target, mine = wanted(plain, batch, aggregation), shared(split)
        limit = min(split.get("micro_batch_size_per_gpu", 1), len(mine))
        data = share(mine, ROWS, {**split, "micro_batch_size_per_gpu": limit})
        found = gradient(engine, data, loss_function(mode, aggregation))
        return float((found - target).norm() / target.norm())

    flashpatch.disable("grpo")
    yield "stock", away("vanilla", AGGREGATIONS[0], SPLITS["all at once"])
    flashpatch.enable("grpo")
    for aggregation in AGGREGATIONS:
        for name, split in SPLITS.items():
            yield f"{aggregation}, {name}", away("grpo_exact", aggregation, split)
        found, rounds = streamed(engine, batch, rank, world, aggregation)
        target = wanted(plain, batch, aggregation)
        yield f"{aggregation}, in {rounds} rounds", float((found - target).norm() / target.norm())


def rank(workdir: Path, seen: dict[str, Any]) -> None:
    """Note, for each FSDP, what `compare` yields; on the first rank what needs only one process as well."""
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    verl_actor.on_cpu("cpu", "bf16")
    import verl.utils.experimental.torch_functional
    import verl.workers.engine
    import verl.workers.engine_workers
    import verl.workers.rollout.router  # noqa: F401
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray(timeout_second=120)
    if number == 0:
        tiny(workdir / "model")
    torch.distributed.barrier()
    for strategy in ("fsdp", "fsdp2"):
        seen[strategy] = dict(compare(strategy, workdir / "model", number, world))
        if number == 0:
            jobs.tell(workdir, f"two ranks have trained under {strategy}")
    if number == 0:
        losses = [{"actor": {"policy_loss": {"loss_mode": mode}}} for mode in OTHER_LOSSES]
        seen |= {
            "refused": [verl_actor.refusal({"actor_rollout_ref": recipe}) for recipe in losses],
            "routed": asyncio.run(asyncio.wait_for(servers.routed(), 60)),
            "resumed": [asyncio.run(asyncio.wait_for(servers.resumed(one), 60)) for one in "ab"],
        }
    distributed.destroy_global_process_group()
