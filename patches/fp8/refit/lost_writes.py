"""Find what a first load wrote to where nothing keeps it: tensors on meta, past the loaders that would have kept it.

An engine that quantizes online holds a layer on meta until all of it has come, and lets the layer's weight loaders keep what
they are given. A model that copies into the parameter itself writes into nothing, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from flashpatch.patches.fp8.refit.errors import update_error
from flashpatch.patches.fp8.refit.policy import listed
from flashpatch.patches.fp8.refit.pristine_params import PristineParam


def refuse(params: Iterable[PristineParam], kept: Callable[[torch.nn.Module], set[str]], model: str) -> None:
    """Refuse a model of whose parameters some were written on meta, and are there still.

    Args:
        params: of a model whose ``load_weights`` has just returned.
        kept: names of a module's parameters for which the engine keeps what came.
        model: class name, for the error.

    Raises:
        PatchError: the first load has lost values.
    """
    lost = [
        param.name for param in params if _is_written_on_meta(param) and param.key not in kept(param.module)
    ]
    if lost:
        raise update_error(
            f"load_weights wrote {listed(lost)} past the weight loaders, into tensors on meta: nothing was loaded",
            "Open this model unquantized (FLASHPATCH=bf16), or from a checkpoint that is quantized.",
            model,
        )


def _is_written_on_meta(param: PristineParam) -> bool:
    live = param.live()
    return param.expected is not None and param.expected.covered > 0 and live is not None and live.is_meta
