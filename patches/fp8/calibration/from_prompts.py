"""Make the profile of a bf16 model from calibration prompts: SmoothQuant's scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.calibration import structure, untrusted
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
from flashpatch.patches.fp8.calibration.profile_file import Profile, check
from flashpatch.patches.fp8.calibration.report import Row, progress
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.calibration.untrusted import PATCH, refuse
from flashpatch.patches.fp8.precision import quantize

#: Used where no prompts are given: short, of the kinds that rollouts see. Own prompts are better.
BUILT_IN = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many clips did she sell? "
    "Let us think step by step.",
    "Prove that the sum of two odd integers is even.\n\nLet the integers be 2a + 1 and 2b + 1.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)",
    "The capital of France is Paris. It lies on the Seine, and about two million people live there.",
    "<answer>42</answer>\nThe probability of drawing two aces without replacement is 4/52 * 3/51 = 1/221.",
)
_SAMPLES = 64  # tokens per exchange kept to judge the result by
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEXT_LIMIT = 64 * untrusted.MIB


def read(path: Path, limit: int) -> list[str]:
    """Read prompts from a UTF-8 text file, one a line; empty lines do not count, and no more than ``limit`` are
    taken.

    Raises:
        PatchError: not such a file, more than 64 MiB, or no prompt in it.
    """
    lines = [line.strip() for line in untrusted.text(path, _TEXT_LIMIT).splitlines()]
    found = [line for line in lines if line][:limit]
    if not found:
        raise refuse(path, "holds no prompt", "Write one prompt a line.")
    return found


def tokens(path: Path, prompts: Sequence[str], length: int) -> list[list[int]]:
    """Return token ids of the prompts, by the tokenizer in ``path``, each cut to ``length``.

    Raises:
        PatchError: there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZERS):  # transformers would make an empty one up
        raise refuse(path, "holds no tokenizer", "Add it, or calibrate with --random N.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raise all sorts
        raise refuse(
            path,
            f"holds no tokenizer that can be used ({type(error).__name__})",
            "Add the tokenizer, or calibrate with --random N.",
        ) from error
    found = [tokenizer(prompt, truncation=True, max_length=length)["input_ids"] for prompt in prompts]
    if not all(found):
        raise refuse(path, "has a tokenizer that makes nothing of a prompt", "Calibrate with --random N.")
    return found


def random_tokens(vocabulary: int, count: int, length: int) -> list[list[int]]:
    """Return ``count`` sequences of random ids; the same every time. Better than nothing: real prompts find
    outliers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


def calibrate(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    alpha: float = 0.5,
    every_exchange: bool = False,
    form: str = "int8",
) -> tuple[Profile, list[Row]]:
    """Return SmoothQuant scales for the exchanges of a model.

    The model is loaded whole, in its own dtype, on the CPU.

    Args:
        checkpoint: the bf16 model.
        sequences: token ids of the prompts.
        alpha: how far the weights take over the activations' range, 0 to 1.
        every_exchange: also between linear layers (value to output, up to down), not only from norms.
        form: ``int8`` or ``fp8``.

    Returns:
        The profile, and for every smoothed layer the relative error of its output with 8-bit weights and
        activations: with smoothing (`Row.error`) and without (`Row.allowed`).

    Raises:
        PatchError: the model cannot be loaded, has no block, or yields values that are not finite.
    """
    blocks = structure.of_directory(checkpoint.path).blocks(checkpoint.shapes)
    exchanges = [e for found in blocks.values() for e in found if every_exchange or e.offset is not None]
    model = _load(checkpoint)
    linear = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    quantized = frozenset(name for name in linear if name.startswith(tuple(blocks)) and name in checkpoint)
    watched = {exchange.consumers[0]: _Seen() for exchange in exchanges}
    modules = dict(model.named_modules())
    with ExitStack() as hooks, progress("calibrating", len(sequences)) as step, torch.no_grad():
        for name, seen in watched.items():
            hooks.callback(modules[name].register_forward_pre_hook(seen.look).remove)
        for ids in sequences:
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
            step()
    smooth, rows = {}, []
    for exchange in exchanges:
        seen = watched[exchange.consumers[0]]
        smooth[exchange.producer] = _scale(exchange, seen, modules, alpha)
        rows += _judge(exchange, seen, modules, smooth[exchange.producer], form, blocks)
    touched = {
        f"{m}.{kind}" for e in exchanges for m in (e.producer, *e.consumers) for kind in ("weight", "bias")
    }
    shapes = {name: checkpoint.shapes[name] for name in sorted(touched | quantized) if name in checkpoint}
    profile = Profile(
        form, "channel", "prompts", checkpoint.fingerprint(), shapes, tuple(exchanges), smooth, quantized
    )
    check(profile, checkpoint.path)
    return profile, rows


class _Seen:
    """Hold what went into a layer: the largest absolute value per channel, and some tokens."""

    def __init__(self) -> None:
        self.amax: torch.Tensor | None = None
        self.samples: list[torch.Tensor] = []
        self.kept = 0

    def look(self, module: torch.nn.Module, args: tuple) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        now = x.abs().amax(0)
        self.amax = now if self.amax is None else torch.maximum(self.amax, now)
        if self.kept < _SAMPLES:
            self.samples.append(x[: _SAMPLES - self.kept].clone())
            self.kept += len(self.samples[-1])


def _load(checkpoint: Checkpoint) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
        ).eval()
    except Exception as error:
        raise refuse(
            checkpoint.path, f"cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _scale(exchange: Exchange, seen: _Seen, modules: dict, alpha: float) -> torch.Tensor:
    """Return the scale of one exchange, float32 [producer channels]."""
    weights = [modules[name].weight.detach().float().abs().amax(0) for name in exchange.consumers]
    act = seen.amax
    if act is None or not all(bool(torch.isfinite(values).all()) for values in (act, *weights)):
        raise PatchError(
            f"{', '.join(exchange.consumers)}: no values, or some that are not finite.",
            patch=PATCH,
            advice="Check the model and the prompts.",
        )
    index = exchange.index.get(exchange.consumers[0])
    if index is not None:  # several input channels share one producer channel, and one scale
        act, *weights = (_largest_of(values, index) for values in (act, *weights))
    return quantize.smooth_scale(act, weights, alpha)


def _largest_of(values: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    where = torch.tensor(index)
    return torch.zeros(int(where.max()) + 1).scatter_reduce(0, where, values.float(), "amax")


def _judge(
    exchange: Exchange, seen: _Seen, modules: dict, scale: torch.Tensor, form: str, blocks: Iterable[str]
) -> list[Row]:
    rows = []
    x = torch.cat(seen.samples)
    for consumer in exchange.consumers:
        weight = modules[consumer].weight.detach().float()
        moved = scale[list(exchange.index[consumer])] if consumer in exchange.index else scale
        exact = x.double() @ weight.double().t()
        error = [_error(a, w, exact, form) for a, w in ((x / moved, weight * moved), (x, weight))]
        layer = next((prefix[:-1] for prefix in blocks if consumer.startswith(prefix)), "")
        rows.append(Row(layer, f"{consumer}.weight", *error))
    return rows


def _error(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor, form: str) -> float:
    xq, wq = quantize.dynamic(x, form), quantize.quantized(weight, form)
    out = quantize.dequantized(*xq).double() @ quantize.dequantized(*wq).double().t()
    return float((out - exact).norm() / exact.norm().clamp(min=1e-30))
