"""bf16 weights on their way into 8-bit parameters: rounded where the engine's own loaders place them.

A loader gets the whole tensor of the checkpoint, then takes this rank's part of it and puts it into its place
in a fused parameter. `Rounding` stands before the loaders of a model's 8-bit weights: a wide value is rounded
whole, so that its scales do not depend on the ranks, and goes on as an 8-bit value and a scale, each through
the loader of its own parameter. No name of a checkpoint and no model class is known here, one tensor is in
hand at a time, and what comes in 8 bits passes as it is. What comes in float32 is cast to the model's dtype
first, as engines do that round after loading: a layer is the same whether a trainer casts or not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import loader_call, quantize
from flashpatch.patches.fp8.precision.loader_call import LoaderCall
from flashpatch.patches.fp8.precision.readings import Readings
from flashpatch.patches.fp8.update.tensors import Unseen

if TYPE_CHECKING:
    from flashpatch.patches.fp8.calibration.profile_file import Profile

PATCH = "fp8.update"
_FORMS = {dtype: form for form, dtype in quantize.DTYPES.items()}
_NO_SHARD = frozenset({"weight_name", "expert_id", "return_success"})  # of a loader's arguments
_LOCAL = "_map_global_expert_id_to_local_expert_id"  # of vLLM's experts; -1 for one of another rank


class Rounding:
    """What rounds the weights of one model.

    Args:
        model: just constructed, nothing loaded; the loaders of its 8-bit parameters are replaced. torch's default dtype is
            still the model's.
        profile: what to smooth before; None for nothing.
        at_load: whether the first load is smoothed too.

    Attributes:
        from_bf16: values that were cast to bf16 are being rounded and placed.
        readings: what is asked about the weights that come."""

    def __init__(self, model: torch.nn.Module, profile: Profile | None = None, at_load: bool = True) -> None:
        self._profile = profile
        self._at_load = at_load
        self._dtype = torch.get_default_dtype()
        self.from_bf16 = False
        self.readings = Readings()
        for path, module in model.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.dtype in _FORMS and parameter.dim() > 1:
                    original = getattr(parameter, "weight_loader", None)
                    if original is not None:
                        loader = self._loader(original, module, f"{path}.{key}".lstrip("."), key)
                        behind = "_weight_loader" in vars(parameter)  # SGLang's property for it cannot be set
                        setattr(parameter, "_weight_loader" if behind else "weight_loader", loader)

    def prepared(
        self, weights: Iterable[tuple[str, torch.Tensor]], first: bool
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Return a load's weights, smoothed if there is a profile, one at a time; ``first``: the engine's own first
        load. Raises PatchError while iterating if a weight is in 8 bits already, so that its norms are smoothed
        already."""
        if self._profile is None or (first and not self._at_load):
            return weights
        return self._smoothed(weights, self._profile)

    def _smoothed(
        self, weights: Iterable[tuple[str, torch.Tensor]], profile: Profile
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in profile.quantized and not _wide(tensor):
                raise PatchError(
                    f"{name} is in 8 bits already, and a profile is to smooth what comes.",
                    patch=PATCH,
                    advice="Send the trainer's weights, or open the engine without the option profile.",
                )
            known = name in profile.shapes or name in profile.quantized
            yield name, profile.smoothed(name, self._narrowed(tensor) if known else tensor)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        wider = _wide(tensor) and tensor.dtype.itemsize > self._dtype.itemsize
        return tensor.to(self._dtype) if wider else tensor

    def _loader(self, original: Callable, module: torch.nn.Module, name: str, key: str) -> Callable:
        names = loader_call.parameter_names(original)

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            """The engine's loader of this parameter, for values of any width; called by position or by keyword."""
            call = LoaderCall(names, args, kwargs)
            loaded = call.at(1)
            if loaded is None or not _wide(loaded) or _elsewhere(module, call):
                return original(*args, **kwargs)
            return self._load_wide(call, original, module, name, key)

        return load

    def _load_wide(
        self, call: LoaderCall, original: Callable, module: torch.nn.Module, name: str, key: str
    ) -> Any:
        parameter, loaded = call.at(0), call.at(1).detach()
        if self._profile is None:  # what was smoothed was cast before
            loaded = self._narrowed(loaded)
        scales = module._parameters.get(f"{key}_scale")
        granularity = _granularity(scales)
        dims = (2, 3) if granularity == "channel" else (2,)
        if granularity is None or loaded.dim() not in dims or not loaded.dim() <= parameter.dim() <= 3:
            raise PatchError(
                f"{name} is {_short(parameter)} of {type(module).__name__}, into which "
                f"{_short(loaded)} values cannot be rounded on the way.",
                patch=PATCH,
                advice="Layers with a scale per channel or per tensor can; use bf16 for this model.",
            )
        label, expert = name.removesuffix(".weight") + _shard(call), call.get("expert_id")
        form = _FORMS[parameter.dtype]
        with Unseen():  # it writes into memory of its own alone, which nobody has to see
            q, scale = quantize.quantized(loaded, form, granularity)
            self.readings.finite(scale, name if expert is None else f"{label}[{expert}]")
        weight_name = call.get("weight_name")  # by which loaders of experts tell scales from weights
        renamed = {} if weight_name is None else {"weight_name": f"{weight_name}_scale"}
        given = scale if granularity == "channel" else scale.reshape(1)
        self.from_bf16 = self._dtype == torch.bfloat16
        try:
            result = call.repeat(original, parameter, q)
            call.repeat(scales.weight_loader, scales, given, **renamed)
        finally:
            self.from_bf16 = False
        return result


def for_model(model: torch.nn.Module, marked: Mapping[str, Any]) -> Rounding:
    """The rounding that a mark of `w8a8` asks for. Raises PatchError if the profile cannot be read here, or the first
    load will bring experts that cannot be rounded."""
    from flashpatch.patches.fp8.calibration.profile_file import load

    if marked.get("at_load", True):
        _refuse_experts(model)

    profile = load(Path(marked["profile"])) if marked.get("profile") else None
    return Rounding(model, profile, bool(marked.get("at_load", True)))


def _refuse_experts(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.dtype not in _FORMS or parameter.dim() != 3:
                continue
            if _granularity(module._parameters.get(f"{key}_scale")) is None:
                raise PatchError(
                    f"experts in 8 bits cannot be filled with wide weights: {path}.{key} is "
                    f"{_short(parameter)} of {type(module).__name__}, without a scale per channel or per tensor.",
                    patch=PATCH,
                    advice="Use bf16 for this model.",
                )


def kernels(model: torch.nn.Module) -> dict[str, int]:
    """How many linear layers and layers of experts run on what: ``scheme/kernel`` by class name, as far as vLLM
    shows it."""
    from vllm.model_executor.layers.linear import LinearBase

    found: dict[str, int] = {}
    for module in model.modules():
        scheme = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        if isinstance(module, LinearBase):
            inside = [
                type(v).__name__
                for v in vars(scheme).values()
                if any("model_executor.kernels" in kind.__module__ for kind in type(v).__mro__)
            ]
        elif scheme is not None and "w13_weight" in module._parameters:
            inside = [kind.__name__ for kind in [getattr(scheme, "experts_cls", None)] if kind is not None]
        else:
            continue
        what = "/".join([type(scheme).__name__, *inside])
        found[what] = found.get(what, 0) + 1
    return found


def _granularity(scales: Any) -> str | None:
    """How a parameter of scales is cut, or None if rounding cannot fill it."""
    if scales is None:
        return None
    cut = getattr(scales, "quant_method", None)  # vLLM writes it on the scales of experts
    if cut is not None:
        return cut if cut in ("channel", "tensor") else None
    # vLLM's and SGLang's classes have the same names
    kinds = {kind.__name__ for kind in type(scales).__mro__}
    if "ChannelQuantScaleParameter" in kinds:
        return "channel"
    return "tensor" if "PerTensorScaleParameter" in kinds else None


def _shard(call: LoaderCall) -> str:
    """Which shard of a fused layer a call loads, as the end of a label."""
    return "".join(
        f"[{value}]"
        for argument, value in call.place()
        if isinstance(value, (str, int)) and argument not in _NO_SHARD
    )


def _elsewhere(module: torch.nn.Module, call: LoaderCall) -> bool:
    """Whether this is a weight of an expert that another rank holds: the loader drops it."""
    expert, local = call.get("expert_id"), getattr(module, _LOCAL, None)
    return expert is not None and local is not None and local(expert) == -1


def _wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
