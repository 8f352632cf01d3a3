"""The engine around a model, as an update needs it: one class whose methods each engine's adapter overrides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from flashpatch.patches.fp8.refit.rank_consensus import Consensus, SingleRank


class LoaderAdapter:
    """Access to an engine's weight loader and requests. An engine overrides what differs there.

    Args:
        device: where the weights live.
        role: of the model in its engine, ``target`` or ``drafter``.

    Attributes:
        consensus: agreement among the ranks that hold parts of this model and process it together.
    """

    def __init__(self, device: torch.device, role: str = "target") -> None:
        self.device, self.role = device, role
        self.consensus = self.make_consensus(role)

    def make_consensus(self, name: str) -> Consensus:
        """Make an agreement of the model's ranks about what has this name."""
        return SingleRank()

    def process(self, module: torch.nn.Module) -> None:
        """Post-process one module as the engine's loader does."""
        raise NotImplementedError

    def deferred(self, module: torch.nn.Module) -> bool:
        """Return whether a module is processed after all others."""
        return False

    def processes(self, module: torch.nn.Module) -> bool:
        """Return whether `process` does anything to a module, asked when the model has just been constructed."""
        return True

    def borrows(self, module: torch.nn.Module) -> bool:
        """Return whether a handle that `process` makes may point into the module's tensors, which then live as long."""
        return True

    def context(self) -> AbstractContextManager[None]:
        """Enter around post-processing: default dtype, engine configuration."""
        return nullcontext()

    def around(self) -> AbstractContextManager[None]:
        """Enter around each call of an update: shows loaders the modules that they know."""
        return nullcontext()

    def refusal(self) -> str | None:
        """Return why this engine cannot be updated at all, or None."""
        return None

    def busy(self) -> bool:
        """Return whether requests are running."""
        return False

    def rounds(self, module: torch.nn.Module, weight: torch.Tensor) -> tuple[str, str] | None:
        """Return the 8-bit format and granularity to which `process` will round a fresh weight; None if it will not."""
        return None

    def quantized_cache(self) -> bool:
        """Return whether the KV cache holds values that were rounded with scales of the model."""
        return False

    def kept(self, module: torch.nn.Module) -> set[str]:
        """Return the names of a module's parameters for which the engine keeps what came, until all of the module has."""
        return set()

    def captured(self) -> bool:
        """Return whether whole forwards are captured as graphs, in which numbers of Python are constants."""
        return False

    def compiled(self) -> bool:
        """Return whether parts of forwards are graphs or compiled code, which go on with the tensors they were made with."""
        return False
