"""Time per fp8 product on this CPU: FlashPatch's kernel against vLLM's own, and against a bf16 linear layer.

    python benchmarks/cpu_fp8.py [--sizes 256 512 1024 2048 4096] [--rows 1 8 64] [--rounds 9] [--threads 1]

A square weight in e4m3 with a scale per channel, bf16 activations that are quantized per token; both kernels
are called as vLLM calls them, quantization of activations included. Times are minima over rounds in which the
three take turns. "/ bf16" is ours over ``torch.nn.functional.linear`` in bf16, "stock / ours" how many times
longer vLLM's own kernel takes. A stock product of more than ``--once-above`` seconds is timed once, and no
larger one is started.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import quick
import torch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--once-above", type=float, default=2.0)
    args = quick.parse(parser, sizes=[256], rows=[1], rounds=2, once_above=0.1)
    torch.set_num_threads(args.threads)
    print(f"{_cpu()}; torch {torch.__version__}, {args.threads} thread{'s' * (args.threads > 1)}\n")
    print("| size | rows | bf16 ms | ours ms | stock ms | ours / bf16 | stock / ours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    hopeless: set[int] = set()
    for size in args.sizes:
        for rows in args.rows:
            ways = _ways(size, rows)
            if rows in hopeless:
                del ways["stock"]
            times = _minima(ways, args.rounds, args.once_above)
            if times.get("stock", 0.0) > args.once_above:
                hopeless.add(rows)
            print(_row(size, rows, times), flush=True)


def _ways(size: int, rows: int) -> dict[str, Callable[[], torch.Tensor]]:
    random = torch.Generator().manual_seed(size)
    weight = torch.randn(size, size, generator=random) / size**0.5
    scale = weight.abs().amax(1, keepdim=True) / 448
    x = torch.randn(rows, size, generator=random).bfloat16()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter((weight / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.input_scale = None
    stock, ours = _kernels(size)
    ours.process_weights_after_loading(layer)
    narrow = weight.bfloat16()
    return {
        "bf16": lambda: torch.nn.functional.linear(x, narrow),
        "ours": lambda: ours.apply_weights(layer, x),
        "stock": lambda: stock.apply_weights(layer, x),
    }


def _kernels(size: int) -> tuple:
    """What vLLM chooses by itself, and what it chooses with ours."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    from flashpatch.patches.fp8.vllm import linear_kernels

    def choose() -> object:
        bf16, token, channel = torch.bfloat16, keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym
        with set_current_vllm_config(VllmConfig()):
            return linear.init_fp8_linear_kernel(token, channel, bf16, bf16, (size, size))

    stock = choose()
    linear_kernels.put_first(linear._POSSIBLE_FP8_KERNELS)
    try:
        return stock, choose()
    finally:
        linear_kernels.take_out(linear._POSSIBLE_FP8_KERNELS)


def _minima(ways: dict[str, Callable[[], torch.Tensor]], rounds: int, once_above: float) -> dict[str, float]:
    """Seconds of the fastest call of each; one that takes longer than ``once_above`` is called once."""
    best: dict[str, float] = {}
    with torch.inference_mode():
        for turn in range(rounds + 1):  # the first warms up
            for name, way in ways.items():
                if best.get(name, 0.0) > once_above:
                    continue
                began = time.perf_counter()
                way()
                taken = time.perf_counter() - began
                best[name] = taken if turn < 2 else min(best[name], taken)
    return best


def _row(size: int, rows: int, times: dict[str, float]) -> str:
    bf16, ours, stock = (times.get(name) for name in ("bf16", "ours", "stock"))
    shown = ("-", "-") if stock is None else (f"{stock * 1e3:.3g}", f"{stock / ours:.1f}")
    spent = f"{bf16 * 1e3:.3g} | {ours * 1e3:.3g} | {shown[0]}"
    return f"| {size} | {rows} | {spent} | {ours / bf16:.1f} | {shown[1]} |"


def _cpu() -> str:
    """Name and the instructions that decide which kernels are fast."""
    name, flags = "unknown CPU", set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
            break
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return f"{name} ({', '.join(flag for flag in known if flag in flags)})"


if __name__ == "__main__":
    main()
