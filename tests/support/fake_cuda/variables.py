"""The variables with which a process of the CUDA environment finds the fake device."""

import os
from pathlib import Path


def variables(environment: Path, capability: int = 90, **more: object) -> dict[str, str]:
    """Return a copy of this process's variables with the fake device's.

    ``environment``: folder of the environment for which `build.py` built the device; ``capability``: ten times the compute
    capability: 80, 89, 90, 100 or 120; ``more``: further variables; `FAKE_CUDA_MIB`, `FAKE_CUDA_FILL` and `FAKE_CUDA_TRACE` among
    them."""
    device = environment / "fake_cuda"
    runtime = next(device.glob("libcudart.so.[0-9]*"))
    cache = environment / "cache"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHPATCH", "VLLM_"))}
    return {
        **kept,
        "FAKE_CUDA": "1",
        "FAKE_CUDA_CAPABILITY": str(capability),
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(device),
        "VLLM_CUDART_SO_PATH": str(runtime),
        "OMP_NUM_THREADS": "1",
        # No compiler for kernels that cannot run: eager, Triton in its interpreter, samplers in torch.
        "TORCH_COMPILE_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # No kernels that sum over ranks.
        "VLLM_DISABLE_PYNCCL": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "HUMMING_CACHE_DIR": str(cache / "humming"),
        # Else each import of it starts two processes that compile, and threads that wait for them.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        **{name: str(value) for name, value in more.items()},
    }
