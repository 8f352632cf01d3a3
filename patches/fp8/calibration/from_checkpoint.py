"""Find the profile that leads from a bf16 checkpoint to its quantized form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.calibration import structure
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
from flashpatch.patches.fp8.calibration.errors import PATCH, refuse
from flashpatch.patches.fp8.calibration.profile_file import Profile
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.precision.quantize import FP8, rounded_to

_FORMS = {torch.int8: "int8", FP8: "fp8"}

#: A weight may differ from its smoothed original by so many times what rounding to nearest gives. Quantizers
#: that make up for one weight's error in the next (GPTQ) round further away than that.
_SLACK = 3.0
#: What bf16 arithmetic may add to the relative error of a tensor that was multiplied (2^-9 a rounding).
_BF16 = 2.0**-7
#: Two norms may show a scale that differs so much from the one their consumers show.
_NORM = 2.0**-5
#: An exchange between linear layers counts if it makes the squared error of its consumers so much smaller.
_WORTH = 1.1
_ROWS = 1024  # of a weight, worked on at once

_BLOCK = re.compile(r"(.+?\.\d+)\.")
_EXTRA = re.compile(
    r"(.+)\.(weight_scale|weight_zero_point|weight_shape|input_scale|input_zero_point|output_scale|[kvq]_scale)\Z"
)


@dataclass(frozen=True)
class Row:
    """Hold how well one quantized tensor is reproduced.

    Attributes:
        layer: name of the block it belongs to.
        tensor: its name.
        error: relative error, Frobenius norm of the difference over that of the reference.
        allowed: the largest error that rounding explains.
        equal: share of the 8-bit values that come out the same."""

    layer: str
    tensor: str
    error: float
    allowed: float
    equal: float


@dataclass
class _Findings:
    form: str = ""
    granularity: str = "tensor"
    exchanges: list[Exchange] = field(default_factory=list)
    smooth: dict[str, torch.Tensor] = field(default_factory=dict)
    certainty: dict[str, torch.Tensor] = field(default_factory=dict)
    quantized: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def so_far(self) -> Profile:
        """Return a profile that smooths with what is known, and rounds nothing."""
        return Profile("int8", "channel", "", {}, tuple(self.exchanges), self.smooth, frozenset())


def compare(model: Checkpoint, other: Checkpoint) -> tuple[Profile, list[Row]]:
    """Find the scales that turn ``model`` into ``other``.

    Memory: a few float32 copies of one tensor's rows, and the tensors themselves one at a time.

    Args:
        model: the checkpoint in bf16 (or any float type).
        other: the same model quantized: compressed-tensors W8A8 int8, or fp8 with channel or tensor scales.

    Returns:
        The profile, and a row per quantized tensor.

    Raises:
        PatchError: ``other`` is not ``model`` quantized; the message names the tensors that show it. Or
            either cannot be read."""
    _same_tensors(model, other)
    blocks: dict[str, list[str]] = {}
    for name in sorted(model.shapes, key=lambda name: [part.zfill(8) for part in name.split(".")]):
        inside = _BLOCK.match(name)
        blocks.setdefault(inside[1] if inside else name.rpartition(".")[0], []).append(name)
    found = _Findings()
    console = Console(stderr=True)
    for block in track(blocks, "comparing", console=console, disable=not console.is_terminal):
        exchanges = list(structure.exchanges(model.config, block, model.shapes))
        for exchange in exchanges:
            _find(model, other, exchange, found)
        for exchange in exchanges:
            if exchange.producer in found.smooth and exchange.offset is None:
                _refine(model, other, exchange, found)
        part = found.so_far()
        for name in blocks[block]:
            _check(model, other, name, block, part, found)
    if found.problems:
        raise _differ(model, other, [f"{name} ({why})" for name, why in found.problems.items()])
    if not found.quantized:
        raise refuse(other.path, "holds no 8-bit weight", "Give a W8A8 or fp8 checkpoint as --quantized.")
    profile = Profile(
        found.form,
        found.granularity,
        model.fingerprint(),
        found.shapes,
        tuple(found.exchanges),
        found.smooth,
        frozenset(found.quantized),
    )
    return profile, found.rows


def _same_tensors(model: Checkpoint, other: Checkpoint) -> None:
    """Check that both hold the same tensors, quantization's own apart, in the same shapes."""
    itself = next((name for name in model.shapes if name.endswith(".weight_scale")), None)
    if itself:
        raise refuse(
            model.path,
            f"is quantized itself: it has {itself}",
            "Give it as --quantized, and the original as --model.",
        )
    wrong = []
    for name, shape in sorted(model.shapes.items()):
        if name not in other:
            wrong.append(f"{name} ({'packed, not 8-bit' if f'{name}_packed' in other else 'missing'})")
        elif other.shapes[name] != shape:
            wrong.append(f"{name} ({list(other.shapes[name])}, not {list(shape)})")
    for name in sorted(other.shapes):
        extra = _EXTRA.match(name)
        belongs = extra is not None and (f"{extra[1]}.weight" in model or extra[2][0] in "kvq")
        tied = name == "lm_head.weight" and model.config.get("tie_word_embeddings")
        if name not in model and not belongs and not tied and not name.endswith("_packed"):
            wrong.append(f"{name} (only in the quantized one)")
    if wrong:
        raise _differ(model, other, wrong)


def _differ(model: Checkpoint, other: Checkpoint, wrong: Sequence[str]) -> PatchError:
    more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    advice = "Give the very model that was quantized (base and instruct are two models)."
    kind = model.config.get("model_type")
    if kind not in structure.TABLE:
        advice += (
            f" A model of type {kind!r} must be quantized without SmoothQuant: which of its layers exchange scales"
            f" is not known, only of {', '.join(structure.TABLE)}."
        )
    return PatchError(
        f"{other.path} is not {model.path} quantized: {', '.join(wrong[:8])}{more}.",
        patch=PATCH,
        advice=advice,
    )


def _find(model: Checkpoint, other: Checkpoint, exchange: Exchange, found: _Findings) -> None:
    """Determine the scale of one exchange, by least squares over the input channels of its consumers."""
    width = model.shapes[f"{exchange.producer}.weight"][0]
    shown = _shown_by_norm(model, other, exchange)
    if shown is not None and bool((shown == 1).all()):
        return
    above, below = torch.zeros(2, width, dtype=torch.float64)
    total = 0.0
    for consumer in exchange.consumers:
        index = torch.tensor(exchange.index.get(consumer, range(width)))
        given_up = found.smooth.get(consumer)
        for old, new, (unit, rows) in _row_chunks(model, other, consumer):
            old = old / unit if given_up is None else old / (unit * given_up[rows, None])
            above.index_add_(0, index, (old * new).sum(0).double())
            below.index_add_(0, index, (old * old).sum(0).double())
            total += float((new * new).sum())
    known = below > 0
    scale = torch.where(known, above / below.clamp(min=1e-300), torch.ones(()) if shown is None else shown)
    odd = ~(torch.isfinite(scale) & (scale > 1e-8))
    if bool(odd.any()):
        share = f"no positive scale fits {int(odd.sum())} of {width} input channels"
        found.problems |= {f"{consumer}.weight": share for consumer in exchange.consumers}
        return
    unmoved = float(below.sum() - 2 * above.sum()) + total  # squared errors, with and without the scale
    moved = max(total - float((above[known] ** 2 / below[known]).sum()), 0.0)
    if shown is None and unmoved <= _WORTH * moved + 1e-6 * total:
        return
    found.exchanges.append(exchange)
    found.smooth[exchange.producer] = scale.float()
    found.certainty[exchange.producer] = below * scale**2
    for module in (exchange.producer, *exchange.consumers):
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in model:
                found.shapes[name] = model.shapes[name]


def _refine(model: Checkpoint, other: Checkpoint, exchange: Exchange, found: _Findings) -> None:
    """Add what the rows of a linear producer say of its scale, each side weighed by how sure it is.

    The variance of a relative scale is that of rounding, 1/12, over the sum of squares in units of rounding."""
    inward, _, _ = found.so_far().scales(f"{exchange.producer}.weight")
    scale, before = found.smooth[exchange.producer].double(), found.certainty[exchange.producer]
    for old, new, (unit, rows) in _row_chunks(model, other, exchange.producer):
        old = old / unit if inward is None else old * inward / unit
        below, above = (old * old).sum(1).double(), (old * new).sum(1).double()
        mine = below / above
        sure = torch.where(torch.isfinite(mine) & (mine > 0), below / mine**2, 0.0)
        scale[rows] = (scale[rows] * before[rows] + mine.nan_to_num(1, 1, 1) * sure) / (before[rows] + sure)
    odd = ~(torch.isfinite(scale) & (scale > 1e-8))
    found.smooth[exchange.producer] = torch.where(odd, 1.0, scale).float()


def _shown_by_norm(model: Checkpoint, other: Checkpoint, exchange: Exchange) -> torch.Tensor | None:
    """Return the scale that two norms show, float64 [channels], 1 where either multiplies by 0; None without a norm."""
    if exchange.offset is None:
        return None
    old = model.tensor(f"{exchange.producer}.weight").double() + exchange.offset
    new = other.tensor(f"{exchange.producer}.weight").double() + exchange.offset
    return torch.where((old != 0) & (new != 0), old / new, torch.ones_like(old))


def _row_chunks(model: Checkpoint, other: Checkpoint, module: str):
    """Yield both weights of a linear layer, some float32 rows at a time: the original, the quantized one in units of its
    rounding, and those units [rows, 1] with the numbers of the rows. Without rounding the unit is 1."""
    old, (new, scale) = model.tensor(f"{module}.weight"), _stored(other, module)
    units = torch.ones(old.shape[0], 1) if scale is None else scale.expand(old.shape[0], 1)
    for start in range(0, old.shape[0], _ROWS):
        rows = torch.arange(start, min(start + _ROWS, old.shape[0]))
        yield old[rows].float(), new[rows].float(), (units[rows], rows)


def _stored(other: Checkpoint, module: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight of the quantized checkpoint as it is stored, and its scale, float32 [out, 1] or [1, 1], if it has one."""
    weight, name = other.tensor(f"{module}.weight"), f"{module}.weight_scale"
    if weight.dtype not in _FORMS:
        if name in other or not weight.dtype.is_floating_point or weight.element_size() < 2:
            raise refuse(
                other.path, f"{module}.weight is {_dtype(weight)} with a scale, which is no format known here"
            )
        return weight, None
    if name not in other:
        raise refuse(other.path, f"lacks {name}, and {module}.weight is {_dtype(weight)}")
    scale = other.tensor(name).float()
    if weight.dim() != 2 or scale.numel() not in (1, weight.shape[0]):
        raise refuse(
            other.path,
            f"{name} has shape {list(scale.shape)}, which is neither per tensor nor per channel",
            "Give a checkpoint with channel or tensor scales.",
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise refuse(other.path, f"{name} holds values that are not positive and finite")
    zero = f"{module}.weight_zero_point"
    if zero in other and bool(other.tensor(zero).any()):
        raise refuse(other.path, f"{zero} is not 0: the weights are asymmetric", "Quantize symmetrically.")
    return weight, scale.reshape(-1, 1)


def _check(
    model: Checkpoint, other: Checkpoint, name: str, layer: str, part: Profile, found: _Findings
) -> None:
    """Compare one tensor of the model, smoothed, with what the quantized checkpoint holds."""
    module, _, kind = name.rpartition(".")
    old = model.tensor(name)
    if not old.dtype.is_floating_point:
        raise refuse(
            model.path, f"{name} is {_dtype(old)}: this model is quantized itself", "Give it as --quantized."
        )
    new, scale = _stored(other, module) if kind == "weight" else (other.tensor(name), None)
    inward, outward, _ = part.scales(name)
    touched = inward is not None or outward is not None
    if scale is not None:
        _check_rounded(name, layer, old, new, scale, part, found)
        return
    if not touched and torch.equal(old, new):
        return
    wanted = part.smoothed(name, old.float()).double()
    error = _relative((wanted - new.double()).norm(), new.double().norm())
    allowed = (
        0.0 if not touched and old.dtype == new.dtype else _NORM if touched and old.dim() == 1 else _BF16
    )
    if not error <= allowed:
        found.problems[name] = f"differs by {100 * error:.3g}%"


def _check_rounded(name, layer, old, new, scale, part: Profile, found: _Findings) -> None:
    form, granularity = _FORMS[new.dtype], "tensor" if scale.numel() == 1 else "channel"
    if found.form not in ("", form):
        found.problems[name] = f"is {form}, others are {found.form}"
        return
    found.form = form
    if granularity == "channel":
        found.granularity = granularity
    found.quantized.add(name)
    found.shapes[name] = tuple(old.shape)
    smoothed = part.smoothed(name, old.float())
    off = nearest = size = same = 0.0
    for start in range(0, old.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        unit = scale if scale.numel() == 1 else scale[rows]
        wanted = smoothed[rows]
        values = new[rows].float()
        again = rounded_to(wanted, unit, new.dtype).float()
        values_now = values * unit
        off += float((wanted - values_now).square().sum())
        nearest += float((wanted - again * unit).square().sum())
        size += float(values_now.square().sum())
        same += float((again == values).sum())
    error = _relative(off**0.5, size**0.5)
    allowed = _SLACK * _relative(nearest**0.5, size**0.5) + _BF16
    # a scale far too small makes rounding to nearest clip, and would then excuse everything
    if not error <= min(allowed, 0.25):
        found.problems[name] = f"differs by {100 * error:.3g}%"
    found.rows.append(Row(layer, name, error, allowed, same / old.numel()))


def _relative(difference, size) -> float:
    difference, size = float(difference), float(size)
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
