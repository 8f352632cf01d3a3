"""Verification of draft trees by sampling, and the filters of its target distribution, for requests that sample.

SGLang has these operators on GPUs alone and verifies greedily on a CPU, before it calls any operator:
`let_cpus_sample` makes it take its own way for GPUs, with the operators of this file."""

import functools
import inspect
import sys
from typing import Any

import torch


def tree_speculative_sampling_target_only_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
) -> None:
    """From the root, accept each child with its probability under the target, sibling after sibling.

    A node's coin [0, 1) falls on one of its children or on none. A rejected child leaves the distribution, so a child
    is accepted with its share of what is left; where none is, the next token is drawn from the residual, and below a
    node without children from the whole target. So tokens follow ``target_probs`` [requests, nodes, vocabulary],
    whatever was drafted, while both thresholds are 1; lower ones accept more, as on GPUs. ``draft_probs`` is scratch
    on GPUs and not read here; the last three arguments are SGLang's options. Outputs are those of
    `verify_tree_greedy_cpu`."""
    predicts = predicts.view(-1)
    for request in range(candidates.shape[0]):
        tokens, numbers = candidates[request].tolist(), retrive_index[request].tolist()
        child, sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        coins = uniform_samples[request].tolist()
        path, left = [0], _normalized(target_probs[request, 0])
        while len(path) < accept_index.shape[1]:
            coin, below, node = coins[path[-1]], 0.0, child[path[-1]]
            while node >= 0:
                share = float(left[tokens[node]])
                below += share
                if share > 0 and (coin < below / threshold_acc or share >= threshold_single):
                    break
                left[tokens[node]] = 0
                node = sibling[node]
            if node < 0:
                break
            predicts[numbers[path[-1]]] = tokens[node]
            path.append(node)
            left = _normalized(target_probs[request, node])
        predicts[numbers[path[-1]]] = _draw(left, float(uniform_samples_for_final_sampling[request]))
        accept_index[request, : len(path)] = torch.tensor([numbers[node] for node in path])
        accept_token_num[request] = len(path) - 1


def _normalized(row: torch.Tensor) -> torch.Tensor:
    """A copy in float64 whose sum is 1: sums of float32 miss 1 by more than a coin may."""
    row = row.double()
    return row / row.sum()


def _draw(weights: torch.Tensor, coin: float) -> int:
    """The token on which a coin [0, 1) falls when each has its weight; never one of weight 0."""
    ends = weights.cumsum(0)
    return int(torch.searchsorted(ends, coin * ends[-1], right=True))


def top_k_renorm_prob_cpu(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Each row's ``top_ks`` largest probabilities, the first ids among equals, scaled to sum 1."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1])
    return _scattered(ordered.masked_fill(ranks >= top_ks.view(-1, 1), 0), order)


def top_p_renorm_prob_cpu(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Each row's largest probabilities, as many as it takes to reach ``top_ps``, scaled to sum 1."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    cut = (before >= top_ps.view(-1, 1)) & (top_ps.view(-1, 1) < 1)
    return _scattered(ordered.masked_fill(cut, 0), order)


def _scattered(ordered: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(ordered).scatter(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


@functools.cache
def let_cpus_sample() -> None:
    """Give SGLang's verification these operators, and let requests that sample reach them.

    Called when the first draft tree is built: SGLang verifies no earlier, and its module is complete by then.
    Batches in which all requests are greedy are verified as before. Draft tokens that are drawn
    (``speculative_use_rejection_sampling``) are left as they were, since SGLang verifies them in Triton.

    Raises:
        RuntimeError: SGLang decides elsewhere, so that samples would be greedy without a word."""
    from sglang.srt.speculative import eagle_utils

    decide = getattr(eagle_utils, "_verify_uses_greedy", None)
    sample = inspect.unwrap(eagle_utils.eagle_sample)  # FlashPatch may have wrapped it
    names = sample.__code__.co_names

    def verify_uses_greedy(*, is_cpu: bool, use_rejection_sampling: bool, **more: Any) -> bool:
        is_cpu = is_cpu and use_rejection_sampling
        return decide(is_cpu=is_cpu, use_rejection_sampling=use_rejection_sampling, **more)

    if decide is not None:
        eagle_utils._verify_uses_greedy = verify_uses_greedy
    elif "_is_cpu" in names:  # before 0.5.21 it asks itself; here it is no HIP either
        sample.__code__ = sample.__code__.replace(
            co_names=tuple(name.replace("_is_cpu", "_is_hip") for name in names)
        )
    else:
        raise RuntimeError(
            "SGLang decides elsewhere whether it verifies greedily: adapt let_cpus_sample to it"
        )
    # before 0.5.23 SGLang imports them where it calls them
    module = eagle_utils if hasattr(eagle_utils, "top_k_renorm_prob") else sys.modules[__package__]
    module.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only_cpu
    module.top_k_renorm_prob = top_k_renorm_prob_cpu
    module.top_p_renorm_prob = top_p_renorm_prob_cpu
