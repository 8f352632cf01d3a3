"""Which expert takes which token, and the sum of what they return."""

import torch

from fake_cuda.standins import operator


@operator("_moe_C::topk_softmax")
def topk_softmax(weights, indices, rows, gates, renormalize, bias=None, is_padding=None):
    probabilities = gates.float().softmax(-1)
    chosen = (probabilities if bias is None else probabilities + bias.float()).topk(weights.shape[-1], -1)[1]
    found = probabilities.gather(-1, chosen)
    weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
    indices.copy_(chosen)
    count, top = weights.shape
    rows.copy_(torch.arange(count * top, device=rows.device).view(top, count).T)


@operator("_moe_C::moe_align_block_size")
def moe_align_block_size(
    topk_ids, experts, block, sorted_ids, expert_ids, padded, expert_map=None, scatter=None
):
    """Tokens by expert, each expert's share padded to whole blocks by the number of tokens."""
    flat = topk_ids.flatten().long().cpu()
    order, owners = [], []
    for expert in range(experts):
        rows = (flat == expert).nonzero().flatten()
        blocks = -(-rows.numel() // block)
        order.append(torch.nn.functional.pad(rows, (0, blocks * block - rows.numel()), value=flat.numel()))
        owners += [expert if expert_map is None else int(expert_map[expert])] * blocks
    joined = torch.cat(order)
    sorted_ids.fill_(flat.numel())
    sorted_ids[: joined.numel()] = joined.to(sorted_ids)
    expert_ids.fill_(-1)
    expert_ids[: len(owners)] = torch.tensor(owners).to(expert_ids)
    padded.fill_(joined.numel())


@operator("_moe_C::moe_sum")
def moe_sum(values, out, topk_ids=None, expert_map=None):
    out.copy_(values.float().sum(1))
