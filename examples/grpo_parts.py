"""The parts of the grpo family on their own: no verl, no Ray, no accelerator; some seconds.

    python examples/grpo_parts.py

Samples of one training step come in any order, with long-tailed lengths. Workers that sometimes die
"generate" them through a registry; complete groups get advantages; a streaming batcher feeds two trainers, of
which one is slow; and the gradient of the loss, accumulated over their unequal batches, is the gradient of
the whole step at once.
"""

from __future__ import annotations

import asyncio
import random

import torch

from flashpatch.patches.grpo.loss.grpo_exact import Counts, grpo_loss
from flashpatch.patches.grpo.loss.logprobs import token_logprobs
from flashpatch.patches.grpo.standalone.batcher import StreamingBatcher
from flashpatch.patches.grpo.standalone.group_gate import GroupGate
from flashpatch.patches.grpo.standalone.registry import Registry, WorkerLost

RANKS, PROMPTS, GROUP, BUDGET = 2, 12, 4, 120
HIDDEN, VOCABULARY = 16, 200

draw = random.Random(0)
head = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, requires_grad=True)


async def generate(worker: str, prompt: int) -> torch.Tensor:
    """A worker's answer: token ids, after a time that grows with their number."""
    if worker == "frail" and draw.random() < 0.1:
        raise WorkerLost("died")
    length = min(60, 1 + int(draw.lognormvariate(2.5, 0.9)))
    await asyncio.sleep(length / 2000)
    return torch.randint(0, VOCABULARY, (length,))


def states(tokens: torch.Tensor) -> torch.Tensor:
    """What a model would compute: hidden states [tokens, hidden], here from the tokens alone."""
    draws = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(len(tokens), HIDDEN, generator=draws, dtype=torch.float64)


def gradient(samples: list, counts: Counts, world: int) -> torch.Tensor:
    """The head's gradient from some samples, averaged over ``world`` ranks as a data-parallel wrapper
    does."""
    (into_head,) = torch.autograd.grad(
        sum(
            grpo_loss(
                token_logprobs(states(one.sample), head, one.sample).logprobs[None],
                torch.tensor([one.advantage]),
                torch.ones(1, len(one.sample)),
                counts,
                world=world,
            ).loss
            for one in samples
        ),
        head,
    )
    return into_head / world


async def main() -> None:
    registry = Registry(generate, cap=400, resubmissions=2)
    for name in ("steady", "other", "frail"):
        await registry.register(name, name)
    gate, batcher = GroupGate(GROUP), StreamingBatcher(RANKS, BUDGET)

    async def sample(prompt: int) -> None:
        tokens = await registry.submit(prompt, tokens=20, prefix=prompt)
        reward = float((tokens % 7 == 0).double().mean())
        for one in gate.add(prompt, tokens, reward):
            await batcher.put(one, len(one.sample))

    async def trainer(rank: int) -> list:
        taken = []
        async for batch in batcher.batches(rank):
            await asyncio.sleep(0.05 * rank)  # rank 1 is slow; producers wait for it
            taken.append(batch)
        return taken

    trainers = [asyncio.create_task(trainer(rank)) for rank in range(RANKS)]
    await asyncio.gather(*(sample(prompt) for prompt in range(PROMPTS) for _ in range(GROUP)))
    await batcher.close()
    taken = await asyncio.gather(*trainers)

    everything = [one for batches in taken for batch in batches if not batch.filler for one in batch.samples]
    counts = Counts(len(everything), sum(len(one.sample) for one in everything))
    for rank, batches in enumerate(taken):
        print(f"rank {rank}: {len(batches)} batches of {[batch.tokens for batch in batches]} tokens")
    print(f"registry: {dict(registry.counts)}")
    parts = [
        gradient(list(batch.samples), counts, RANKS)
        for batches in taken
        for batch in batches
        if not batch.filler
    ]
    whole = gradient(everything, counts, 1)
    away = float((sum(parts) - whole).abs().max())
    print(f"{len(everything)} of {PROMPTS * GROUP} samples trained")
    print(f"largest difference to the gradient of the whole step at once: {away:.0e}")
    assert len(everything) == PROMPTS * GROUP and away < 1e-10


asyncio.run(main())
