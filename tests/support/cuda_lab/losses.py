"""Compare losses on CUDA with float64 on the CPU: log-probabilities in blocks, and a GRPO loss summed over two halves.

python -m cuda_lab.losses OUT"""

import sys

import torch

from cuda_lab import results
from flashpatch.patches.grpo.loss.grpo_exact import Clip, count, grpo_loss
from flashpatch.patches.grpo.loss.logprobs import token_logprobs

SAMPLES, LENGTH, HIDDEN, VOCABULARY = 4, 96, 256, 5000


def main(out: str) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(SAMPLES, LENGTH, HIDDEN, generator=draw).bfloat16()
    head = torch.randn(VOCABULARY, HIDDEN, generator=draw).bfloat16()
    labels = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=draw)
    advantages = torch.randn(SAMPLES, generator=draw)
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH, (SAMPLES, 1), generator=draw)
    wanted = _plain(hidden.double(), head.double(), labels, advantages, mask)
    got = _ours(*(tensor.cuda() for tensor in (hidden, head, labels, advantages, mask)))
    away = {name: _distance(got[name].cpu().double(), wanted[name]) for name in wanted}
    results.add_all(out, away)


def _ours(hidden, head, labels, advantages, mask) -> dict[str, torch.Tensor]:
    hidden = hidden.requires_grad_()
    counts, logprobs = count(mask), []
    for half in (slice(0, SAMPLES // 2), slice(SAMPLES // 2, None)):
        found = token_logprobs(hidden[half], head, labels[half], tokens=64, vocabulary=1024).logprobs
        how = dict(old_logprobs=found.detach(), clip=Clip())  # on policy: the gradient of the log-probability
        grpo_loss(found, advantages[half], mask[half], counts, **how).loss.backward()
        logprobs.append(found.detach())
    return {"logprobs": torch.cat(logprobs), "gradient": hidden.grad}


def _plain(hidden, head, labels, advantages, mask) -> dict[str, torch.Tensor]:
    hidden = hidden.requires_grad_()
    logprobs = (hidden @ head.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    means = (logprobs * mask).sum(-1) / mask.sum(-1)
    (-(advantages * means).sum() / (mask.sum(-1) > 0).sum()).backward()
    return {"logprobs": logprobs.detach(), "gradient": hidden.grad}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


if __name__ == "__main__":
    main(*sys.argv[1:])
