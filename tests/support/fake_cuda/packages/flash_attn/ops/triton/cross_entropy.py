"""The cross entropy of FlashAttention, a Triton kernel there: tensors of the CPU are refused as Triton refuses them."""

import torch


def cross_entropy_loss(logits, labels, logit_scale=1.0, ignore_index=-100, **_):
    if not logits.is_cuda:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    scores = logits.float() * logit_scale
    losses = torch.nn.functional.cross_entropy(scores, labels, ignore_index=ignore_index, reduction="none")
    return losses, torch.zeros_like(losses)
