"""Read FlashRL's ``profile.pt`` without executing what it holds.

FlashRL stores a dictionary: tensor name to ``input_scale``, ``output_scale`` and ``type``. A new weight times
both scales is the 8-bit value; for a norm, the input scale is what SmoothQuant left of it, and the consumers'
input scales are its inverse. Its fp8 profile is a list of names.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from flashpatch.patches.fp8.calibration import pickle_names, structure, untrusted
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
from flashpatch.patches.fp8.calibration.profile_file import Profile, check
from flashpatch.patches.fp8.calibration.untrusted import refuse
from flashpatch.patches.fp8.precision.quantize import FP8

_KEYS = frozenset({"input_scale", "output_scale", "type"})
_FORMS = {torch.int8: "int8", FP8: "fp8"}
_CLOSE = 2.0**-6


def convert(path: Path, model: Checkpoint) -> Profile:
    """Make a profile from FlashRL's, for the bf16 model that FlashRL made it for.

    Raises:
        PatchError: not such a file; it holds code, or anything but names and scales; its tensors are not
            those of the model; scales that are zero, negative or not finite; scales that do not exchange.
    """
    held = _read(path)
    blocks = structure.of_directory(model.path).blocks(model.shapes)
    if isinstance(held, list):
        names = frozenset(untrusted.tensor_name(name, path) for name in held)
        _known(names, model, path)
        shapes = {name: model.shapes[name] for name in sorted(names)}
        profile = Profile("fp8", "channel", "flashrl", model.fingerprint(), shapes, (), {}, names)
        check(profile, path)
        return profile
    if not isinstance(held, dict):
        raise refuse(path, f"holds a {type(held).__name__}, not the dictionary or list that FlashRL stores")
    entries = {untrusted.tensor_name(name, path): _entry(name, entry, path) for name, entry in held.items()}
    _known(frozenset(entries), model, path)
    smooth, exchanges = {}, []
    for exchange in (e for found in blocks.values() for e in found):
        scale = _smooth(exchange, entries, model, path)
        if scale is not None and not bool((scale == 1).all()):
            smooth[exchange.producer] = scale
            exchanges.append(exchange)
    forms = {_FORMS[kind] for _, _, kind in entries.values() if kind in _FORMS}
    if len(forms) != 1:
        raise refuse(
            path, f"quantizes to {', '.join(sorted(forms)) or 'nothing'}", "Convert one 8-bit format."
        )
    quantized = frozenset(name for name, (_, _, kind) in entries.items() if kind in _FORMS)
    touched = {f"{m}.{k}" for e in exchanges for m in (e.producer, *e.consumers) for k in ("weight", "bias")}
    shapes = {name: model.shapes[name] for name in sorted(touched | quantized) if name in model}
    weight_scale = {}
    for name in quantized:
        module, out = name.removesuffix(".weight"), model.shapes[name][0]
        given_up = smooth.get(module, torch.ones(out))
        weight_scale[name] = (1 / (_vector(entries[name][1], out, name, path) * given_up)).reshape(out, 1)
    profile = Profile(
        forms.pop(),
        "channel",
        "flashrl",
        model.fingerprint(),
        shapes,
        tuple(exchanges),
        smooth,
        quantized,
        weight_scale,
    )
    check(profile, path)
    return profile


def facts(path: Path) -> tuple[str, int]:
    """Return the form of FlashRL's profile, ``int8`` or ``fp8``, and the number of tensors that it names.

    Raises:
        PatchError: not such a file; it holds code, or anything but names and scales.
    """
    held = _read(path)
    if isinstance(held, list) and held:
        return "fp8", len([untrusted.tensor_name(name, path) for name in held])
    if not isinstance(held, dict) or not held:
        raise refuse(path, f"holds a {type(held).__name__}, not the dictionary or list that FlashRL stores")
    kinds = {_entry(untrusted.tensor_name(name, path), entry, path)[2] for name, entry in held.items()}
    forms = {_FORMS[kind] for kind in kinds if kind in _FORMS}
    if len(forms) != 1:
        raise refuse(path, f"quantizes to {', '.join(sorted(forms)) or 'nothing'}", "Give one 8-bit format.")
    return forms.pop(), len(held)


def _smooth(exchange, entries, model, path) -> torch.Tensor | None:
    """Return the scale that all consumers' entries agree on, float32 [channels]; None where they name none."""
    width = model.shapes[f"{exchange.producer}.weight"][0]
    found = None
    for consumer in exchange.consumers:
        name = f"{consumer}.weight"
        if name not in entries:
            continue
        scale = _vector(entries[name][0], model.shapes[name][1], name, path)
        if consumer in exchange.index:
            spread = torch.ones(width)
            spread[list(exchange.index[consumer])] = scale
            if not torch.equal(spread[list(exchange.index[consumer])], scale):
                raise refuse(path, f"{name} scales channels apart that {exchange.producer} feeds together")
            scale = spread
        if found is not None and not torch.allclose(found, scale, rtol=_CLOSE):
            raise refuse(path, f"the consumers of {exchange.producer} have different input scales")
        found = scale if found is None else found
    norm = entries.get(f"{exchange.producer}.weight") if exchange.offset is not None else None
    if norm is not None:
        left = _vector(norm[0], width, f"{exchange.producer}.weight", path)
        if exchange.offset:
            raise refuse(
                path,
                f"scales the norm {exchange.producer}, which multiplies by 1 + weight, as if by weight",
                "Make a profile with --quantized.",
            )
        if found is not None and not torch.allclose(found * left, torch.ones(width), rtol=_CLOSE):
            raise refuse(
                path, f"the scales of {exchange.producer} and of its consumers are not each other's inverse"
            )
        found = 1 / left if found is None else found
    return found


def _read(path: Path) -> Any:
    """Return the plain data in the file: torch's zip format, uncompressed, and nothing that is not a container or
    tensor."""
    untrusted.size(path, untrusted.PROFILE_LIMIT)
    if code := pickle_names.suspicious(path):
        raise refuse(
            path,
            f"holds code: it would import {', '.join(code[:4])[:200]}; nothing in it was executed",
            "A profile of FlashRL holds names and scales only: do not trust this file.",
        )
    if not zipfile.is_zipfile(path):
        raise refuse(path, "is not a file that torch.save writes (a bare pickle is not opened)")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(
            e.compress_type != zipfile.ZIP_STORED or e.file_size > untrusted.PROFILE_LIMIT for e in entries
        ):
            raise refuse(path, "is compressed, which torch.save does not do")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise _unread(path, error) from error
    except Exception as error:
        from pickle import UnpicklingError

        if isinstance(
            error, (UnpicklingError, AttributeError, TypeError, IndexError, UnicodeError, AssertionError)
        ):
            raise _unread(path, error) from error
        raise


def _unread(path: Path, error: Exception) -> Exception:
    if type(error).__module__.startswith("flashpatch"):
        return error
    return refuse(
        path,
        f"is not plain data; nothing in it was executed ({type(error).__name__})",
        "A profile of FlashRL holds names and scales only: do not trust this file.",
    )


def _entry(name: str, entry: Any, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    if not isinstance(entry, dict) or set(entry) != _KEYS or not isinstance(entry["type"], torch.dtype):
        raise refuse(path, f"{name} has not the entries input_scale, output_scale and type")
    scales = []
    for key in ("input_scale", "output_scale"):
        value = entry[key]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = torch.tensor(float(value))
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            raise refuse(path, f"the {key} of {name} is no number and no float tensor")
        value = value.detach().float()
        if value.layout != torch.strided or not bool((torch.isfinite(value) & (value > 0)).all()):
            raise refuse(path, f"the {key} of {name} holds values that are not positive and finite")
        scales.append(value)
    return scales[0], scales[1], entry["type"]


def _known(names: frozenset[str], model: Checkpoint, path: Path) -> None:
    missing = sorted(name for name in names if name not in model)
    if missing or not names:
        raise refuse(
            path,
            f"names {', '.join(missing[:4]) or 'nothing'}, which {model.path} does not have",
            "Give the bf16 model that FlashRL made it for as --model.",
        )


def _vector(scale: torch.Tensor, size: int, name: str, path: Path) -> torch.Tensor:
    if scale.numel() not in (1, size):
        raise refuse(path, f"a scale of {name} has shape {list(scale.shape)}, not {size} values")
    return scale.reshape(-1).expand(size).clone()
