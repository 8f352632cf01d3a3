"""Bookkeeping of the paged key-value cache and of speculative batches.

``table`` is SGLang's request-to-token table, int32 [requests, longest]: cache slots by request row and position."""

import ctypes

import torch


def _spans(*columns: torch.Tensor):
    return zip(*(column.tolist() for column in columns))


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, width) -> None:
    """Write the slots, packed one request after another, into ``table[row, start:end]``."""
    taken = 0
    for row, start, end in _spans(rows, starts, ends):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, width) -> None:
    """The reverse: read ``table[row, start:end]`` of all requests into ``slots``, packed."""
    taken = 0
    for row, start, end in _spans(rows, starts, ends):
        slots[taken : taken + end - start] = table[row, start:end].to(slots.dtype)
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, slots, width, branches, steps) -> None:
    """Per request the ``branches * steps`` slots after its tokens, in order."""
    count = branches * steps
    for i, (row, length) in enumerate(_spans(rows, lengths)):
        slots[i * count : (i + 1) * count] = table[row, length : length + count].to(slots.dtype)


def build_draft_decode_metadata_cpu(table, rows, lengths, branches, steps, width) -> torch.Tensor:
    """A table with a row per branch of each request: the shared prefix, then that branch's own slots."""
    expanded = torch.zeros(rows.numel() * branches, width, dtype=table.dtype)
    for i, (row, length) in enumerate(_spans(rows, lengths)):
        own = table[row, length : length + branches * steps].view(branches, steps)
        lines = expanded[i * branches : (i + 1) * branches]
        lines[:, :length] = table[row, :length]
        lines[:, length : length + steps] = own
    return expanded


def fill_bonus_tokens_cpu(tokens, counts, bonus, stride) -> None:
    """The last accepted token of each request; ``counts`` includes it."""
    last = torch.arange(counts.numel()) * stride + counts.long() - 1
    bonus.copy_(tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(index, slots, accepted) -> None:
    """Slots of the accepted draft tokens, packed; -1 in ``index`` stands for none."""
    chosen = index.flatten()
    chosen = chosen[chosen >= 0].long()
    accepted[: chosen.numel()] = slots[chosen]


def copy_all_layer_kv_cache_cpu(addresses, strides, targets, sources) -> None:
    """Copy cache lines from ``sources`` to ``targets`` in every layer; all are read before any is written."""
    targets, sources = targets.tolist(), sources.tolist()
    for base, stride in _spans(addresses, strides):
        lines = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, line in zip(targets, lines):
            ctypes.memmove(base + target * stride, line, stride)


def rotate_input_ids_cpu(ids, starts, lengths, newest, places=None) -> None:
    """Shift each request's ids left by one and put its newest token last (or at its place in ``places``)."""
    newest = newest.flatten()
    for i, (start, length) in enumerate(_spans(starts, lengths)):
        if length == 0:
            continue
        ids[start : start + length - 1] = ids[start + 1 : start + length].clone()
        ids[int(places[i]) if places is not None else start + length - 1] = newest[i]
