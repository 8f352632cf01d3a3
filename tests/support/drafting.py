"""Draft as an engine does, one place at a time, with a sequence that grows by what the drafter puts out.

Each drafting is a causal forward of transformers' layer over the captured rows up to a place and one row per later
step; no mask, cache or batch of several places is involved."""

from collections.abc import Callable

import torch
from torch import Tensor

from flashpatch.patches.eagle.train.drafter import Drafter, Drafter3
from flashpatch.patches.eagle.train.pack import Pack
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings


def draft(
    drafter: Drafter,
    embeddings: TargetEmbeddings,
    window: Pack,
    place: int,
    steps: int,
    choose: Callable[[int, Tensor], int],
) -> list[Tensor]:
    """Return what the head reads [H] at each step of a drafting from row ``place`` of a window.

    ``choose(step, output)`` gives the token that step ``step`` reads, from the output [H] of the step before."""
    rows = [row for row in range(place + 1) if bool(window.seen[row]) or row == place]
    eagle3 = isinstance(drafter, Drafter3)
    states = window.states[rows][None]
    hidden = drafter.fc(states) if eagle3 else states
    embedded = embeddings.embed(window.next_ids[rows])[None].to(states.dtype)
    positions = window.positions[rows][None]
    outputs: list[Tensor] = []
    put_out = hidden
    for step in range(steps):
        if step:
            token = torch.tensor([[choose(step, outputs[-1])]])
            embedded = torch.cat((embedded, embeddings.embed(token).to(states.dtype)), 1)
            hidden = torch.cat((hidden, put_out[:, -1:]), 1)
            positions = torch.cat((positions, positions[:, -1:] + 1), 1)
        put_out = _forward(drafter, hidden, embedded, positions)
        outputs.append((drafter.norm(put_out) if eagle3 else put_out)[0, -1])
    return outputs


def _forward(drafter: Drafter, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
    """Return the layer's outputs [1, n, H], before EAGLE-3's last norm."""
    length = hidden.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    rotary = drafter.rotary(embedded, positions)
    if not isinstance(drafter, Drafter3):
        inputs = drafter.fc(torch.cat((embedded, hidden), -1))
        return drafter.layers[0](inputs, attention_mask=causal, position_embeddings=rotary)
    layer = drafter.midlayer
    both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
    hidden = hidden + layer.self_attn(both, position_embeddings=rotary, attention_mask=causal)[0]
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@torch.no_grad()
def accepted(drafter: Drafter, embeddings: TargetEmbeddings, windows: list[Pack], steps: int) -> list[float]:
    """Return, for each draft position, the share of greedy draftings whose tokens up to it are the target's."""
    right, tried = [0] * steps, 0
    for window in windows:
        for place in range(len(window) - steps):
            if not bool(window.learn[place]):
                continue
            tried += 1
            outputs = draft(
                drafter, embeddings, window, place, steps, lambda _, one: int(embeddings.logits(one).argmax())
            )
            wanted = embeddings.logits(window.targets[place : place + steps]).argmax(-1)
            for step, output in enumerate(outputs):
                if int(embeddings.logits(output).argmax()) != int(wanted[step]):
                    break
                right[step] += 1
    return [count / tried for count in right]
