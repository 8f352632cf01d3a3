"""Prepare torch for SGLang on a CPU. Import it before SGLang; what it changes waits for SGLang's import.

- With STANDIN_AMX=1 SGLang believes that the processor has AMX tiles.
- ``torch.tensor(..., pin_memory=True)``, by which SGLang 0.5.12 returns a prompt's log-probabilities, gives pageable memory:
  a machine without an accelerator has no other, and torch would raise.
"""

import functools
import os
import sys


class _BeforeSGLang:
    """A finder that finds nothing; the first import of SGLang passes it."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            import torch

            if os.environ.get("STANDIN_AMX") == "1":
                torch.cpu._is_amx_tile_supported = lambda: True
            torch.tensor = _pageable(torch.tensor)


def _pageable(tensor):
    @functools.wraps(tensor)
    def pageable(*args, pin_memory=False, **kwargs):
        return tensor(*args, **kwargs)

    return pageable


sys.meta_path.insert(0, _BeforeSGLang())
