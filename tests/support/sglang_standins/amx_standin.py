"""Prepare torch for SGLang on a CPU. Import it before SGLang; what it changes waits for SGLang's imports.

- With STANDIN_AMX=1 SGLang believes that the processor has AMX tiles, with 0 that it has none; without, it sees the processor's.
- Pinned memory, which SGLang's LoRA layers and its record of experts ask for, and SGLang 0.5.12 for a prompt's log-probabilities too, is
  pageable: a machine without an accelerator has no other, and torch would raise.
- Before 0.5.21: ``apply_fp8_linear``, which SGLang calls on a CPU too and which is in Triton, is replaced by plain PyTorch."""

import functools
import importlib.util
import os
import sys
from importlib import metadata
from types import SimpleNamespace

VERSION = tuple(int(part) for part in metadata.version("sglang").split(".")[:3])
FP8 = "sglang.srt.layers.quantization.fp8_utils"


class _BeforeSGLang:
    """A finder that finds SGLang's package, and its module with the fp8 function, and extends how they are loaded.

    To look for SGLang, as FlashPatch does without importing it, imports no torch."""

    looking = False

    def find_spec(self, name, path=None, target=None):
        if self.looking or name not in ("sglang", FP8 if VERSION < (0, 5, 21) else ""):
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            if name == "sglang":
                _prepare_torch()
            execute(module)
            if name == FP8:
                module.apply_fp8_linear = fp8_linear

        spec.loader.exec_module = exec_module
        return spec


def _prepare_torch():
    import torch

    if asked := os.environ.get("STANDIN_AMX"):
        # 0.5.12 asks the second, newer versions the first. Newer ones must not find the second: torch would believe it too.
        (torch._C._cpu if VERSION < (0, 5, 13) else torch.cpu)._is_amx_tile_supported = lambda: asked == "1"
    if hasattr(torch.tensor, "__wrapped__"):
        return
    # torch keeps the functions that `with torch.device(...)` is for: those that are called in the end, not the ones made here.
    # Else transformers, which makes its models on `meta`, would leave the buffers of positions as they come.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in ("tensor", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    done = lambda *range: 0  # noqa: E731
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=done, cudaHostUnregister=done)


def _pageable(make):
    @functools.wraps(make)
    def pageable(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    pageable.__wrapped__ = make
    return pageable


def fp8_linear(input, weight, weight_scale, input_scale=None, input_scale_ub=None, bias=None, **options):
    """float8 weight [in, out] with one scale, or one per column; activations keep their precision."""
    wide = weight.float() * weight_scale.float().reshape(1, -1)
    output = input.float() @ wide
    return (output if bias is None else output + bias.float()).to(input.dtype)


sys.meta_path.insert(0, _BeforeSGLang())
