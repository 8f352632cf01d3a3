"""Draft trees: their layout for the verifying forward, and greedy verification.

A tree of ``n`` nodes has the last accepted token as node 0. ``selected`` holds the candidate number of each other
node; candidate ``c`` was proposed in block ``c // topk`` of the draft, and ``parents[block]`` is the candidate that
block grew from (block 0 grew from the root)."""

import torch

from .sampling import let_cpus_sample

_FULL, _DRAFT_ONLY = 0, 1  # tree_mask_mode: columns for prefix and draft, or for the draft alone


def build_tree_kernel_efficient_cpu(
    parents, selected, lengths, mask, positions, index, first_child, sibling, topk, depth, n, mask_mode
) -> None:
    """Fill, per request: visibility of nodes, positions, node numbers, first child and next sibling (-1: none)."""
    let_cpus_sample()
    positions, mask_flat, written = positions.view(-1), None if mask is None else mask.view(-1), 0
    for request, length in enumerate(lengths.tolist()):
        above = _parents(parents[request].tolist(), selected[request].tolist(), topk, n)
        sees = torch.eye(n, dtype=torch.bool)
        for node in range(1, n):
            sees[node] |= sees[above[node]]  # parents come before their children
        first = request * n
        positions[first : first + n] = length + sees.sum(1) - 1
        index[request] = torch.arange(first, first + n)
        first_child[request] = sibling[request] = -1
        for node in reversed(range(1, n)):  # the lowest number ends up first among siblings
            sibling[request, node] = first_child[request, above[node]]
            first_child[request, above[node]] = node
        if mask_flat is not None and mask_mode in (_FULL, _DRAFT_ONLY):
            prefix = torch.ones(n, length if mask_mode == _FULL else 0, dtype=torch.bool)
            rows = torch.cat([prefix, sees], 1).flatten()
            mask_flat[written : written + rows.numel()] = rows.to(mask_flat.dtype)
            written += rows.numel()


def _parents(blocks: list[int], selected: list[int], topk: int, n: int) -> list[int]:
    node_of = {candidate: node for node, candidate in enumerate(selected[: n - 1], start=1)}
    above = [0]
    for candidate in selected[: n - 1]:
        block = candidate // topk
        above.append(0 if block == 0 else node_of[blocks[block]])
    return above


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """From the root, follow the child that is the target's own choice, for as long as there is one.

    ``predicts`` gets the target's choice at every node passed, ``accept_index`` the numbers of these nodes,
    ``accept_token_num`` how many of them were drafted."""
    wanted = target_predict.flatten().tolist()
    predicts = predicts.view(-1)
    for request in range(candidates.shape[0]):
        tokens, numbers = candidates[request].tolist(), retrive_index[request].tolist()
        child, sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        node, path = 0, [0]
        while len(path) < accept_index.shape[1]:
            want = wanted[numbers[node]]
            node = child[node]
            while node >= 0 and tokens[node] != want:
                node = sibling[node]
            if node < 0:
                break
            path.append(node)
        for depth, passed in enumerate(path):
            number = numbers[passed]
            accept_index[request, depth] = number
            predicts[number] = wanted[number]
        accept_token_num[request] = len(path) - 1
