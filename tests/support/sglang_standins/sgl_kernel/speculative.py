"""What n-gram speculation calls by this module's name."""

import torch

from sgl_kernel import sampling


def reconstruct_indices_from_tree_mask(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    batch: int,
    n: int,
) -> None:
    """Write the positions and links of trees whose node i has node j < i as an ancestor where ``mask[b, i, j]``.

    A node's parent is its last ancestor; links lead to its first child and to its parent's next child, or are -1.

    Args:
        mask: bool, flat [batch * n * n].
        lengths: [batch], tokens of each request that are verified.
        positions: int64 [batch * n], written.
        index, next_token, next_sibling: int64 [batch, n], written."""
    sampling.let_cpus_sample()
    above = torch.tril(mask.view(batch, n, n).bool(), -1)
    order = torch.arange(n)
    positions.copy_((above.sum(-1) + lengths[:, None]).flatten())
    index.copy_(torch.arange(batch * n).view(batch, n))
    parents = torch.where(above, order, -1).amax(-1)
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row in range(batch):
        children: dict[int, int] = {}
        for node in reversed(range(n)):
            parent = int(parents[row, node])
            next_token[row, node] = children.get(node, -1)
            if parent >= 0:
                next_sibling[row, node] = children.get(parent, -1)
                children[parent] = node
