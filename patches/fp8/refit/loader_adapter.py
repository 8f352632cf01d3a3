"""The engine around a model, as an update needs it: one interface that each engine's adapter fills in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from flashpatch.patches.fp8.refit.rank_consensus import Consensus, SingleRank


@dataclass
class LoaderAdapter:
    """Access to an engine's weight loader and requests.

    Attributes:
        device: where the weights live.
        process: post-processes one module as the engine's loader does.
        deferred: whether a module is processed after all others.
        context: entered around post-processing (default dtype, engine configuration).
        around: entered around each call of an update; it shows loaders the modules that they know.
        role: of the model in its engine, ``target`` or ``drafter``.
        consensus: agreement among the ranks that hold parts of this model and process it together.
        another_consensus: makes an agreement of the same ranks about something else, which has this name.
        refusal: why this engine cannot be updated at all, or None.
        busy: whether requests are running.
        rounds: to which 8-bit format and granularity post-processing will round a module's fresh weight; None if it does
            not, or if values came rounded.
        borrows: whether a kernel's handle that ``process`` makes may point into tensors of the module, which then stay
            in memory as long as the handle does; asked at the same time.
        processes: whether ``process`` does anything to a module, asked when the model has just been constructed.
        quantized_cache: whether the KV cache holds values that were rounded with scales of the model.
        kept: names of a module's parameters for which the engine keeps what came, until all of the module has.
        captured: whether whole forwards are captured as graphs, in which numbers of Python are constants.
        compiled: whether parts of forwards are graphs or compiled code, which go on with the tensors they were made with.
    """

    device: torch.device
    process: Callable[[torch.nn.Module], None]
    deferred: Callable[[torch.nn.Module], bool]
    context: Callable[[], AbstractContextManager]
    around: Callable[[], AbstractContextManager] = nullcontext
    role: str = "target"
    consensus: Consensus = field(default_factory=SingleRank)
    another_consensus: Callable[[str], Consensus] = lambda name: SingleRank()
    refusal: Callable[[], str | None] = lambda: None
    busy: Callable[[], bool] = lambda: False
    rounds: Callable[[torch.nn.Module, torch.Tensor], tuple[str, str] | None] = lambda module, weight: None
    processes: Callable[[torch.nn.Module], bool] = lambda module: True
    borrows: Callable[[torch.nn.Module], bool] = lambda module: True
    quantized_cache: Callable[[], bool] = lambda: False
    kept: Callable[[torch.nn.Module], set[str]] = lambda module: set()
    captured: Callable[[], bool] = lambda: False
    compiled: Callable[[], bool] = lambda: False
