"""What vLLM does by itself when weights are updated in place: the reason for the weight-update patch.

No FlashPatch anywhere. The wrong outcomes are asserted, so that a vLLM which gets one right fails the
test and its message says so: the `remove_when` of the patch has come for that case.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, environment, models, oracle, quantized, scenario

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@dataclass(frozen=True)
class Case:
    """A model and engine; what `reload_weights` and a second `model.load_weights` do with it.

    native: "exact", "wrong" (silently) or "nan" (silently). naive: a part of the error's text.
    """

    family: str
    native: str
    naive: str
    scheme: str | None = None
    kw: dict[str, Any] = field(default_factory=dict)
    broken: str = ""  # a part of the error with which the installed vLLM fails to run the engine at all

    def model(self, seed: int) -> Path:
        directory = models.checkpoint(environment.store() / "models", self.family, seed)
        return quantized.quantize(directory, self.scheme) if self.scheme else directory


OLD, OLDER = (version_of("vllm") < Version(least) for least in ("0.29", "0.27"))
"""Measured on 0.27.1 and 0.24.0."""
SHAPE = "Attempted to load weight"
LOADER = "has no attribute 'weight_loader'"
"""A post-processed parameter has lost its loader. In 0.24 it keeps it, which meets the shape of the kernel's weight."""

CASES = {
    "bf16": Case("qwen2", "exact", SHAPE if OLDER else LOADER),
    "fp32": Case("llama", "exact", LOADER, kw=dict(dtype="float32")),
    "bf16-tied": Case("qwen2-tied", "exact" if OLD else "wrong", SHAPE if OLDER else LOADER),
    "bf16-moe": Case("qwen3-moe", "exact" if OLD else "wrong", SHAPE if OLDER else LOADER),
    "fp8-online": Case(
        *("qwen2", "exact", "AssertionError"),
        kw=dict(quantization="fp8_per_channel"),
        broken="dynamic_per_token_scaled_fp8_quant() expected at most 0 argument" if OLD else "",
    ),
    "ct-fp8": Case("qwen2", "exact", SHAPE if OLDER else LOADER, scheme="fp8-channel"),
    "ct-int8": Case(
        "qwen2", "exact" if environment.amx() else "nan", "KeyError" if OLDER else LOADER, scheme="int8"
    ),
    "ct-w4a16": Case("qwen2", "exact", "RuntimeError: start", scheme="w4a16"),
}

answers_of_stock = functools.partial(oracle.answers, env=oracle.STOCK)

LONG = ("fp32", "bf16-moe", "ct-fp8", "ct-int8")

needs_avx512 = pytest.mark.skipif(
    not environment.avx512(), reason="without AVX-512 vLLM packs no bf16 weights and has no 4-bit kernel"
)


def cases(*packed: str) -> list[Any]:
    """All cases; those named show what they show only where vLLM packs bf16 weights."""
    return [
        pytest.param(name, marks=[needs_avx512] * (name in packed) + [pytest.mark.full] * (name in LONG))
        for name in CASES
    ]


# --- what runs in the engine's process


def updates(a: str, b: str, kw: dict[str, Any]) -> dict[str, Any]:
    """One engine on A: vLLM's own reload of B, then a naive load of A, then post-processing as in verl."""
    with engines.open_llm(a, **kw) as llm:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        found = dict(native=engines.answers(llm))
        q_first = sorted(models.weights(a), key=lambda item: "q_proj" not in item[0])  # as trainers send
        found["naive"] = _error(lambda: engines.inner_model(llm).load_weights(q_first))
        found["processed"] = _error(lambda: _process(engines.inner_runner(llm))) or engines.answers(llm)
    return found


def reload_with(packed: bool, a: str, b: str) -> list[dict[str, Any]]:
    """vLLM's own reload of an int8 checkpoint, then a fresh engine on it, as on a CPU with AMX or without."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    cpu.check_cpu_sgl_kernel = lambda n, k, dtype: packed
    with engines.open_llm(a) as llm:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        native = engines.answers(llm)
    with engines.open_llm(b) as llm:
        return [native, engines.answers(llm)]


def buckets(a: str, cuts: list[list[str]]) -> dict[str, Any]:
    """An engine on A; `reload_weights` once per bucket of names, each from the checkpoint named first."""
    with engines.open_llm(a) as llm:
        for source, *names in cuts:
            bucket = [(name, tensor) for name, tensor in models.weights(source) if name in names]
            llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(bucket)))
        return engines.answers(llm)


def prefixes(a: str, b: str) -> dict[str, Any]:
    """Greedy tokens with the prefix cache on: after a reload of B, and again after the cache was reset."""
    with engines.open_llm(a, enable_prefix_caching=True, block_size=32) as llm:  # four blocks a prompt
        engines.greedy(llm)
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        stale = engines.greedy(llm)
        return dict(stale=stale, reset=llm.reset_prefix_cache(), fresh=engines.greedy(llm))


def _process(runner: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(runner.vllm_config):
        process_weights_after_loading(runner.model, runner.model_config, runner.device)


def _error(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- the tests


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner({"VLLM_PLUGINS": ""}) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def outcome(runner: scenario.Runner) -> Callable[[str], dict[str, Any]]:
    @functools.cache
    def of(name: str) -> dict[str, Any]:
        case = CASES[name]
        if case.broken:
            with pytest.raises(scenario.ScenarioError, match=re.escape(case.broken)):
                runner(updates, str(case.model(0)), str(case.model(1)), case.kw)
            pytest.skip(f"this build of vLLM cannot run {name}: {case.broken}")
        return runner(updates, str(case.model(0)), str(case.model(1)), case.kw)

    return of


def still_wrong(got: Any, want: Any, what: str) -> engines.Difference:
    gap = engines.difference(got, want)
    assert not gap.exact, f"upstream has been fixed: {what} is exact now (see the patch's remove_when)"
    return gap


@pytest.mark.parametrize("name", cases("bf16-tied", "ct-w4a16"))
def test_native_reload(name: str, outcome: Callable[[str], dict[str, Any]]) -> None:
    case = CASES[name]
    got, want = outcome(name)["native"], answers_of_stock(case.model(1), **case.kw)
    if case.native == "exact":
        assert engines.difference(got, want).exact
        return
    gap = still_wrong(got, want, f"reload_weights of {name}")
    assert gap.nan if case.native == "nan" else gap.mean > 0.5 and not gap.nan


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_native_reload_of_int8_on_either_kind_of_cpu(packed: bool) -> None:
    """Exact where weights stay parameters, packed; NaN where they move into oneDNN's handles, before 0.29 in both."""
    if packed and not environment.packed_ops():
        pytest.skip("this CPU's build of vLLM has no packed int8 kernel")
    a, b = (str(CASES["ct-int8"].model(seed)) for seed in (0, 1))
    native, fresh = scenario.run(reload_with, packed, a, b, env={"VLLM_PLUGINS": ""})
    gap = engines.difference(native, fresh)
    assert gap.exact if packed and not OLD else gap.nan, gap


@pytest.mark.parametrize("name", cases("bf16", "bf16-tied", "bf16-moe", "ct-w4a16"))
def test_a_second_load_dies(name: str, outcome: Callable[[str], dict[str, Any]]) -> None:
    error = outcome(name)["naive"]
    assert error is not None, f"upstream has been fixed: {name} takes a second model.load_weights"
    assert CASES[name].naive in error


@needs_avx512
def test_processing_after_a_failed_load_is_not_a_way_out(outcome: Callable[[str], dict[str, Any]]) -> None:
    """0.32 runs on and answers like neither model; 0.31 dies of an IndexError."""
    got = outcome("bf16")["processed"]
    if isinstance(got, str):
        assert "IndexError" in got, f"upstream has been fixed: it refuses ({got})"
        return
    for seed in (0, 1):
        still_wrong(got, answers_of_stock(CASES["bf16"].model(seed)), "post-processing after a failed load")


def test_buckets_that_split_a_fused_layer_are_silently_wrong(runner: scenario.Runner) -> None:
    a, b = CASES["bf16"].model(0), str(CASES["bf16"].model(1))
    names = [name for name, _ in models.weights(b)]
    first = [name for name in names if "q_proj" in name]
    got = runner(buckets, str(a), [[b, *first], [b, *(name for name in names if name not in first)]])
    still_wrong(got, answers_of_stock(b), "a bucket with q, then one with k and v")


def test_buckets_of_whole_layers_are_exact(runner: scenario.Runner) -> None:
    a, b = CASES["bf16"].model(0), str(CASES["bf16"].model(1))
    names = [name for name, _ in models.weights(b)]
    cuts = [[name for name in names if f"layers.{layer}." in name] for layer in (0, 1)]
    cuts.append([name for name in names if ".layers." not in name])
    got = runner(buckets, str(a), [[b, *cut] for cut in cuts])
    assert engines.difference(got, answers_of_stock(b)).exact


def test_an_update_of_q_alone_is_silently_wrong(runner: scenario.Runner) -> None:
    """The same values again, so nothing may change."""
    a = CASES["bf16"].model(0)
    got = runner(buckets, str(a), [[str(a), *(name for name, _ in models.weights(a) if "q_proj" in name)]])
    still_wrong(got, answers_of_stock(a), "an update of q_proj alone")


def test_cached_prefixes_outlive_the_weights(runner: scenario.Runner) -> None:
    a, b = CASES["bf16"].model(0), CASES["bf16"].model(1)
    got = runner(prefixes, str(a), str(b))
    want = answers_of_stock(b)["tokens"]
    assert got["stale"] != want, "upstream has been fixed: a reload resets the prefix cache"
    assert got["reset"] is True and got["fresh"] == want


@pytest.mark.parametrize(
    "quantization",
    ["int8_per_channel_weight_only", pytest.param("nvfp4_per_token", marks=pytest.mark.vllm(least="0.27"))],
)
def test_a_scheme_that_leaves_every_linear_unquantized(quantization: str) -> None:
    model = CASES["bf16"].model(0)
    gap = engines.difference(answers_of_stock(model, quantization=quantization), answers_of_stock(model))
    assert gap.exact, f"upstream has been fixed: {quantization} quantizes dense models"


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor"])
def test_fp8_per_tensor_needs_the_standin(quantization: str, runner: scenario.Runner) -> None:
    """Here its op does not exist; with vllm_lab.fp8_standin it answers, and not as bf16 does."""
    model = CASES["bf16"].model(0)
    with pytest.raises(scenario.ScenarioError, match="scaled_fp8_quant"):
        runner(oracle.ask, str(model), quantization=quantization)
    gap = engines.difference(answers_of_stock(model, quantization=quantization), answers_of_stock(model))
    assert gap.mean > 0.1 and not gap.nan
