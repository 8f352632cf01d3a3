"""Everything that hangs on a model's modules: tensors by content and address, plain values, and types of objects.

The walk shares no code with FlashPatch, so that both cannot overlook the same thing."""

import functools
import hashlib
import types
from typing import Any

import torch

_DEPTH = 9
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_OF_TORCH = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward", "_backward", "_state_dict", "_load_state", "_is_full_backward", "_non_persistent")
# Settings, and what holds the process together: none of it belongs to a layer.
_FOREIGN = (
    *("vllm.config", "sglang.srt.configs", "sglang.srt.server_args"),
    *("transformers", "logging", "threading", "flashpatch"),
)
# vLLM's timer of its own rounding, the folder of a model's first checkpoint, names that verl notes during an update.
_BOOKKEEPING = ("online_quantization_time", "['flashpatch']", "_name_or_path", "@_verl_qualname")


def snapshot(model: torch.nn.Module) -> tuple[dict[str, tuple], dict[str, int]]:
    """Return by path what is there, and the address of each tensor (0 on meta)."""
    walk = _Walk()
    for name, module in model.named_modules():
        walk.found[f"{name}:type"] = ("type", type(module).__name__)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                walk.visit(f"{name}.{key}", tensor, 0)
        walk.seen.add(id(module))
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _OF_TORCH and not key.startswith(_HOOKS):
                walk.visit(f"{name}.{key}", value, 0)
    found = {path: what for path, what in walk.found.items() if not any(one in path for one in _BOOKKEEPING)}
    return found, walk.addresses


def kernels(found: dict[str, tuple]) -> set[str]:
    """Return the class names of the kernels and expert backends that a snapshot shows."""
    names = {what[1].rpartition(".")[2] for what in found.values() if what[0] == "type"}
    return {name for name in names if "Kernel" in name or "Experts" in name}


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, tuple] = {}
        self.addresses: dict[str, int] = {}
        self.seen: set[int] = set()

    def visit(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, _PLAIN):
            self.found[path] = ("plain", repr(value))
        elif not self._is_foreign(value, depth):
            self.seen.add(id(value))
            for key, inner in self._parts(path, value):
                self.visit(f"{path}{key}", inner, depth + 1)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        meta = tensor.device.type == "meta"
        # as text: a tuple comes back as a list from a worker in another process
        layout = f"{tuple(tensor.shape)} by {tuple(tensor.stride())}"
        shape = (type(tensor).__name__, layout, str(tensor.dtype))
        self.found[path] = ("tensor", *shape, str(tensor.device), "meta" if meta else _digest(tensor))
        self.addresses[path] = 0 if meta else tensor.data_ptr()
        for key, value in vars(tensor).items():
            if isinstance(value, (int, float, bool, str, tuple)):
                self.found[f"{path}@{key}"] = ("attribute", repr(value))

    def _is_foreign(self, value: Any, depth: int) -> bool:
        if isinstance(value, (type, types.ModuleType)) or depth > _DEPTH or id(value) in self.seen:
            return True
        return type(value).__module__.startswith(_FOREIGN)

    def _parts(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, dict):
            return [
                (f"[{key!r}]" if not callable(key) else "[function]", inner) for key, inner in value.items()
            ]
        if isinstance(value, (list, tuple)):
            return [(f"[{index}]", inner) for index, inner in enumerate(value)]
        if isinstance(value, functools.partial):
            return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
        if isinstance(value, types.MethodType):
            return [(".self", value.__self__)]
        if isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            return [(f"<{name}>", cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        if hasattr(value, "__dict__") and not type(value).__module__.startswith("torch."):
            self.found[f"{path}:type"] = ("type", f"{type(value).__module__}.{type(value).__name__}")
            return [(f".{key}", inner) for key, inner in vars(value).items() if not key.startswith(_HOOKS)]
        return []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _digest(tensor: torch.Tensor) -> str:
    if not tensor.numel():
        return "empty"
    raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
