"""A first load that writes into tensors on meta is refused, unless the engine has kept what came."""

import re

import fp8_toys as toys
import pytest
import torch
from fp8_toys import checkpoint, manage

from flashpatch.errors import PatchError


def on_meta(**overrides):
    """A model whose first projection waits on meta, as under online quantization, and the tracked model."""
    model = toys.Model()
    waiting = model.layers[0].down
    waiting.weight = torch.nn.Parameter(waiting.weight.to("meta"), requires_grad=False)
    waiting.weight.weight_loader = model.layers[1].down.weight.weight_loader
    return waiting, manage(model, kept=lambda module: overrides["kept"] if module is waiting else set())


def test_what_was_written_on_meta_is_named() -> None:
    _, managed = on_meta(kept=set())
    with pytest.raises(PatchError, match=re.escape("layers.0.down.weight")) as error:
        managed.load(managed._model.load_weights, checkpoint(0))
    assert "FLASHPATCH=bf16" in str(error.value)


def test_what_the_engine_keeps_is_not_lost() -> None:
    waiting, managed = on_meta(kept={"weight"})
    managed.load(managed._model.load_weights, checkpoint(0))
    assert waiting.weight.is_meta and managed.state == "loading"
