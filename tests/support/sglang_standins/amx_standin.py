"""Lets SGLang believe, when STANDIN_AMX=1, that the processor has AMX tiles. Import it before SGLang."""

import os

if os.environ.get("STANDIN_AMX") == "1":
    import torch

    torch.cpu._is_amx_tile_supported = lambda: True
