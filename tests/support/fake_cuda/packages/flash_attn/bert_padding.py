"""Take padding out of rows, and put it back."""

import torch
from einops import rearrange  # noqa: F401  verl imports it from here


def index_first_axis(values, indices):
    return values.index_select(0, indices)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Return what is not padding, its flat places, the ends of sequences, the longest, and how many tokens count in each."""
    counted = attention_mask.sum(-1, dtype=torch.int32)
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    places = mask.flatten().nonzero().flatten()
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return index_first_axis(hidden_states.flatten(0, 1), places), places, ends, lengths.max().item(), counted


def pad_input(hidden_states, indices, batch, seqlen):
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
