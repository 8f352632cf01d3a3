"""Pass settings to the training worker, another process, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from flashpatch.patches.eagle.errors import eagle_error

_BOUNDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rate", "clip", "ttt_steps", "window", "batch"), lambda value: 0 < value < inf),
    **dict.fromkeys(("samples", "bytes", "least"), lambda value: value > 0),
    **dict.fromkeys(("states", "tokens", "versions", "threads"), lambda value: 0 <= value < inf),
    "ttt_decay": lambda value: 0 < value <= 1,
    "dtype": ("bfloat16", "float16", "float32").__contains__,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hold the hyperparameters of drafter training.

    Attributes:
        rate: learning rate of AdamW.
        clip: largest norm of the gradient.
        states: weight of the SmoothL1 loss on states.
        tokens: weight of the soft cross entropy.
        ttt_steps: draft steps that training unrolls (training-time test, arXiv 2503.01840); 1 for the first alone.
        ttt_decay: weight of each step's loss over that of the step before; the weights are scaled to sum 1."""

    rate: float = 1e-4
    clip: float = 0.5
    states: float = 1.0
    tokens: float = 0.1
    ttt_steps: int = 1
    ttt_decay: float = 0.8

    def __post_init__(self) -> None:
        """Raise PatchError for values that describe no training."""
        given = vars(self)
        if odd := [
            f"{name}={given[name]}" for name in given if name in _BOUNDS and not _BOUNDS[name](given[name])
        ]:
            raise eagle_error(
                "trainer",
                f"{', '.join(odd)} describes no training.",
                "Give numbers above 0, ttt_decay up to 1, and dtype as bfloat16, float16 or float32.",
            )


@dataclass(frozen=True)
class WorkerSettings(Recipe):
    """Hold the settings of `worker`, the recipe among them.

    Attributes:
        target: folder of the target's checkpoint (config and safetensors), for embeddings and head.
        queue: directory of captured samples.
        folder: where drafters are written, and the newest is gone on from.
        engine: ``vllm`` or ``sglang``, whose format drafters get.
        drafter: folder of a drafter to continue from; "" for one from scratch.
        kind: ``eagle`` or ``eagle3``.
        dtype: of the drafters written; training is in float32.
        device: torch device; "" for the first accelerator, else the CPU.
        window: longest window of a sample, in positions.
        batch: positions of a step, over all its windows.
        samples, bytes, versions: see `buffer.Buffer`.
        least: samples in the buffer before training starts.
        seed: of the weights from scratch and of the draws.
        niceness: added to the process's, so that engines have priority.
        threads: of torch on the CPU; 0 for torch's default."""

    target: str
    queue: str
    folder: str
    engine: str = "vllm"
    drafter: str = ""
    kind: str = "eagle"
    dtype: str = "bfloat16"
    device: str = ""
    window: int = 512
    batch: int = 4096
    samples: int = 10_000
    bytes: int = 4 << 30
    versions: int = 2
    least: int = 8
    seed: int = 0
    niceness: int = 5
    threads: int = 0

    def dump(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WorkerSettings:
        """Make settings from a mapping, such as what `dump` wrote. Raises PatchError if a setting does not exist; the
        message lists those that do."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known) if isinstance(given, Mapping) else [repr(given)]
        missing = [name for name in ("target", "queue", "folder") if name not in given]
        if unknown or missing:
            raise eagle_error(
                "trainer",
                f"worker settings: {', '.join(unknown)} unknown, {', '.join(missing) or 'none'} missing.",
                f"Known are {', '.join(sorted(known))}.",
            )
        return cls(**given)
