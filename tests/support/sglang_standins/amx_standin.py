"""Lets SGLang believe, when STANDIN_AMX=1, that the processor has AMX tiles. Import it before SGLang."""

import os
import sys


class _BeforeSGLang:
    """A finder that finds nothing; the first import of SGLang passes it."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            import torch

            torch.cpu._is_amx_tile_supported = lambda: True


if os.environ.get("STANDIN_AMX") == "1":
    sys.meta_path.insert(0, _BeforeSGLang())
