"""Each precision by its name: from a bf16 model, or a template, to an engine that takes the trainer's bf16 weights.

The oracle of int8 is stock vLLM on a compressed-tensors checkpoint of the same weights, written by the
laboratory's own converter: the first load and every update must equal it to the last bit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, quantized, scenario

pytestmark = pytest.mark.vllm

A, B = ("qwen2", 0), ("qwen2", 1)
_FULL = pytest.mark.full


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    """Functions choose the precision themselves."""
    with scenario.Runner(
        {"FLASHPATCH_LEDGER": str(environment.store() / "ledger")}, standin=True
    ) as interpreter:
        yield interpreter


def opened(name: str, model: str, **kw: Any) -> Any:
    import flashpatch

    flashpatch.enable(name, **kw.pop("options", {}))
    return engines.open_llm(model, **kw)


def there_and_back(name: str, model: str, sources: list[str], seed: int, **kw: Any) -> dict[str, Any]:
    """Open `model` in the precision `name`, then send each source in bf16, in buckets that cut fused layers."""
    import flashpatch
    from flashpatch import ledger

    rng = random.Random(seed)
    with opened(name, model, **kw) as llm:
        inner = engines.inner_model(llm)
        before = engines.addresses(inner)
        found: dict[str, Any] = dict(answers=[engines.answers(llm)], errors=[])
        for number, source in enumerate(sources):
            updates.send(llm, updates.buckets(list(models.weights(source)), rng))
            if number % 2:
                updates.finish(llm)
            found["answers"].append(engines.answers(llm))
            found["errors"].append(errors_of(inner))
        found.update(
            moved=sorted(k for k, at in engines.addresses(inner).items() if before.get(k) != at),
            kernels=ledger.notes()["kernels"],
            precision=ledger.notes()["precision"],
        )
    flashpatch.disable(name)
    return found


def errors_of(model: Any) -> dict[str, float]:
    from flashpatch.patches.fp8.refit import model_registry

    return dict(model_registry.get(model).rounding_errors)


def check(found: dict[str, Any], want: list[dict[str, Any]]) -> None:
    gaps = [engines.difference(got, fresh) for got, fresh in zip(found["answers"], want, strict=True)]
    assert all(gap.exact for gap in gaps), gaps
    assert not found["moved"]


def int8(family: str, seed: int) -> dict[str, Any]:
    return oracle.answers(updates.checkpoint(family, seed, "int8"))


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-tied",
        *(
            pytest.param(f, marks=_FULL)
            for f in ("qwen2", "llama", "llama-biased", "gemma3", "phi3", "qwen3")
        ),
    ],
)
def test_int8_without_a_template(runner: scenario.Runner, family: str) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    seed = updates.seed_of_the_day()
    print(f"FLASHPATCH_LAB_SEED={seed}")
    found = runner(there_and_back, "int8", a, [b, a, b], seed)
    want = [int8(family, seed) for seed in (0, 1)]
    assert engines.difference(*want).mean > 0.01
    check(found, [want[i % 2] for i in range(4)])
    assert found["kernels"] == {"CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel": 8}
    assert found["precision"] == "int8"
    assert all(0 < error < 0.02 for error in found["errors"][0].values()) and len(found["errors"][0]) >= 8


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8", "int8"),
        pytest.param("fp8", "fp8-channel", marks=_FULL),
        pytest.param("fp8", "fp8-tensor", marks=_FULL),
    ],
)
def test_a_quantized_checkpoint_is_the_template(runner: scenario.Runner, name: str, scheme: str) -> None:
    template = updates.checkpoint(*A, scheme)
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    found = runner(there_and_back, name, template, [b, a], updates.seed_of_the_day())
    want = [oracle.answers(updates.checkpoint("qwen2", seed, scheme)) for seed in (0, 1)]
    check(found, [want[0], want[1], want[0]])


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        pytest.param("fp8_channel", dict(quantization="fp8_per_channel"), marks=_FULL),
        ("fp8_tensor", dict(quantization="fp8_per_tensor")),
        pytest.param("int8_weight_only", quantized.torchao("Int8WeightOnlyConfig"), marks=_FULL),
    ],
)
def test_the_engines_own_precisions_by_name(
    runner: scenario.Runner, name: str, stock: dict[str, Any]
) -> None:
    if name == "int8_weight_only":
        pytest.importorskip("torchao")
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    found = runner(there_and_back, name, a, [b, a], updates.seed_of_the_day())
    want = [oracle.answers(source, **stock) for source in (a, b)]
    check(found, [want[0], want[1], want[0]])
    assert found["precision"] == name and not any("Unquantized" in kernel for kernel in found["kernels"])
    limit = 0.04 if name.startswith("fp8") else 0.02
    assert len(found["errors"][0]) == 8 and all(0 < error < limit for error in found["errors"][0].values())


def send_on_rank(worker: Any, path: str, parts: int) -> None:
    items = list(models.weights(path))
    for part in range(parts):
        worker.get_model().load_weights(items[len(items) * part // parts : len(items) * (part + 1) // parts])


def two_ranks(a: str, b: str) -> list[dict[str, Any]]:
    """Each rank rounds whole tensors and takes its part."""
    with engines.open_llm(a, tensor_parallel_size=2) as llm:
        before = engines.answers(llm)
        llm.collective_rpc(send_on_rank, args=(b, 3))
        return [before, engines.answers(llm)]


@pytest.mark.full
def test_int8_on_two_ranks(runner: scenario.Runner) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = scenario.run(two_ranks, a, b, env={"FLASHPATCH": "int8"})
    for seed, answers in enumerate(got):
        want = oracle.answers(updates.checkpoint("qwen2", seed, "int8"), tensor_parallel_size=2)
        assert engines.difference(answers, want).exact


def opened_on_dummy_weights(a: str, b: str) -> dict[str, Any]:
    """As verl opens engines: no first load that could teach what to expect."""
    import flashpatch

    with opened("int8", a, load_format="dummy") as llm:
        half = list(models.weights(b))
        missing = updates.error(lambda: (updates.send(llm, [half[:-3]]), updates.finish(llm)))
        updates.send(llm, [half[:7], half[7:]])
        updates.finish(llm)
        answers = engines.answers(llm)
    flashpatch.disable("int8")
    return dict(missing=missing, answers=answers)


def test_int8_on_dummy_weights(runner: scenario.Runner) -> None:
    found = runner(opened_on_dummy_weights, updates.checkpoint(*A), updates.checkpoint(*B))
    assert "incomplete" in found["missing"]
    assert engines.difference(found["answers"], int8(*B)).exact


# -- the engine's int8 kernel, and the bound of its error ----------------------------------------------


def layers_against_the_trainer(a: str, b: str) -> dict[str, Any]:
    """After an update from A to B: each linear layer of the engine against the trainer's bf16 weights of B.

    With ``|dw| <= sw / 2`` per channel and ``|dx| <= sx / 2`` per token, an output is off by at most
    ``sum(|x| sw/2 + |w| sx/2 + sw sx/4)``, and then rounded to bf16. For each layer: its weights' largest error
    over ``sw / 2``, and the largest error of an output over that bound, computed from the stored values with exact
    sums and by the engine's kernel.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear import CPUInt8ScaledMMLinearKernel as Kernel

    import flashpatch
    from flashpatch.patches.fp8.precision import quantize

    called: Counter[str] = Counter()
    stored: list[tuple[Any, Any]] = []
    process = Kernel.process_weights_after_loading

    def keep(self: Any, layer: Any) -> None:
        stored.append((layer.weight.detach().clone(), layer.weight_scale.detach().clone()))
        process(self, layer)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            if "scaled_mm" in name:
                called[f"{name} {sorted({str(t.dtype) for t in args if isinstance(t, torch.Tensor)})}"] += 1
            elif name in ("aten.mm.default", "aten.addmm.default", "aten.linear.default"):
                called[name] += 1
            return func(*args, **(kwargs or {}))

    found: dict[str, Any] = {}
    with opened("int8", a) as llm:
        inner = engines.inner_model(llm)
        trainer = {name: tensor.float() for name, tensor in models.weights(b)}
        paths = [path for path, layer in inner.named_modules() if hasattr(layer, "scheme")]
        Kernel.process_weights_after_loading = keep
        try:
            updates.send(llm, [list(models.weights(b))])
            updates.finish(llm)
        finally:
            Kernel.process_weights_after_loading = process
        found["stored"] = [str(q.dtype) for q, _ in stored]
        order = sorted(paths, key=lambda path: finished(path, list(trainer)))
        kept = dict(zip(order, stored, strict=True))
        noise = torch.Generator().manual_seed(0)
        found["layers"] = {}
        with torch.no_grad(), set_current_vllm_config(engines.inner_runner(llm).vllm_config):
            for path, parts in FUSED.items():
                layer, (q, sw) = inner.get_submodule(path), kept[path]
                base = path.rpartition(".")[0]
                w = torch.cat([trainer[f"{base}.{part}.weight"] for part in parts])
                bias = [trainer[f"{base}.{part}.bias"] for part in parts if f"{base}.{part}.bias" in trainer]
                bias = torch.cat(bias) if bias else None
                x = torch.randn(16, w.shape[1], generator=noise).bfloat16()
                exact = quantize.w8a8(x, q, sw, bias).float()
                with Seen():
                    kernel = layer.quant_method.apply(layer, x, layer.bias).float()
                x = x.float()
                want = x @ w.t() + (0 if bias is None else bias)
                sx = x.abs().amax(1, keepdim=True) / 127
                from_w, from_x = x.abs().sum(1, keepdim=True) * sw.t() / 2, sx / 2 * w.abs().sum(1)
                bound = from_w + from_x + w.shape[1] * sx * sw.t() / 4
                bound = bound * (1 + 2**-8) + want.abs() * 2**-8
                found["layers"][path] = dict(
                    weight=float(((q.float() * sw - w).abs() / (sw / 2)).max()),
                    exact=float(((exact - want).abs() / bound).max()),
                    kernel=float(((kernel - want).abs() / bound).max()),
                    relative=float((kernel - want).norm() / want.norm()),
                )
        found["called"] = dict(called)
        called.clear()
        with Seen():
            engines.greedy(llm, tokens=1)
        found["generated"] = dict(called)
    flashpatch.disable("int8")
    return found


def finished(path: str, names: list[str]) -> int:
    """When the last part of a layer comes, in a checkpoint's order."""
    base, _, name = path.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
        name, (name,)
    )
    mine = [
        at for at, known in enumerate(names) if any(known.startswith(f"{base}.{part}.") for part in parts)
    ]
    return max(mine)


FUSED = {
    "model.layers.0.self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "model.layers.0.self_attn.o_proj": ("o_proj",),
    "model.layers.1.mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "model.layers.1.mlp.down_proj": ("down_proj",),
}


def test_the_int8_kernel_is_called_and_within_the_formats_bound(runner: scenario.Runner) -> None:
    """Without VNNI, oneDNN's int8 products are not exact: there the kernel is held to a wider, measured bound."""
    found = runner(layers_against_the_trainer, updates.checkpoint(*A), updates.checkpoint(*B))
    assert found["stored"] == ["torch.int8"] * 8
    for calls, forwards in ((found["called"], 4), (found["generated"], 8 * len(engines.PROMPTS))):
        int8_calls = sum(n for name, n in calls.items() if "scaled_mm" in name and "torch.int8" in name)
        assert int8_calls >= forwards, calls
    assert not any(name.startswith("aten.") for name in found["called"]), "a layer multiplied in bf16"
    for path, error in found["layers"].items():
        assert error["weight"] <= 1 + 1e-4 and error["exact"] <= 1, (path, error)
        assert error["kernel"] <= (1 if environment.vnni() else 4), (path, error)
        assert 0 < error["relative"] < (0.03 if environment.vnni() else 0.06), (path, error)


# -- a profile ------------------------------------------------------------------------------------------


def smooth_profile(model: str) -> Path:
    """A profile that moves scale from norms into what they feed, and from up into down."""
    import torch

    from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
    from flashpatch.patches.fp8.calibration.profile_file import Profile, save
    from flashpatch.patches.fp8.calibration.structure import Exchange

    path = environment.store() / f"{Path(model).name}.profile.safetensors"
    if path.exists():
        return path
    shapes = {name: tuple(tensor.shape) for name, tensor in models.weights(model)}
    noise, exchanges, smooth = torch.Generator().manual_seed(7), [], {}
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for producer, offset, consumers in (
            ("input_layernorm", 0.0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", 0.0, ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.up_proj", None, ("mlp.down_proj",)),
        ):
            exchanges.append(Exchange(f"{at}.{producer}", offset, tuple(f"{at}.{c}" for c in consumers)))
            width = shapes[f"{at}.{producer}.weight"][0]
            smooth[f"{at}.{producer}"] = torch.rand(width, generator=noise) + 0.5
    rounded = frozenset(
        name for name in shapes if name.endswith("proj.weight") and "0.self_attn.o_proj" not in name
    )
    with Checkpoint(model) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    save(Profile("int8", "channel", "prompts", fingerprint, shapes, tuple(exchanges), smooth, rounded), path)
    return path


def smoothed(model: str) -> str:
    """The checkpoint that `smooth_profile` makes of a model: its scales moved, its linear layers in int8 but one."""
    import json

    from safetensors.torch import save_file

    from flashpatch.patches.fp8.calibration.profile_file import load
    from flashpatch.patches.fp8.precision import quantize

    source = Path(model)
    profile = load(smooth_profile(str(source.with_name("qwen2-0"))))
    with models.making(source.with_name(f"{source.name}-smoothed")) as (target, work):
        if work is not None:
            for file in Path(quantized.quantize(source, "int8")).iterdir():
                if file.suffix != ".safetensors":
                    (work / file.name).write_bytes(file.read_bytes())
            save_file(
                dict(quantize.stream(models.weights(source), "int8", profile=profile)),
                work / "model.safetensors",
                metadata={"format": "pt"},
            )
            config = json.loads((work / "config.json").read_text())
            config["quantization_config"]["ignore"].append("model.layers.0.self_attn.o_proj")
            (work / "config.json").write_text(json.dumps(config))
    return str(target)


@pytest.mark.parametrize("template", [False, pytest.param(True, marks=_FULL)], ids=["bf16 model", "template"])
def test_a_profile_smooths_what_the_trainer_sends(runner: scenario.Runner, template: bool) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    opens = smoothed(a) if template else a
    options = dict(profile=str(smooth_profile(a)))
    found = runner(there_and_back, "int8", opens, [b, a], updates.seed_of_the_day(), options=options)
    want = [oracle.answers(smoothed(source)) for source in (a, b)]
    assert engines.difference(want[0], int8(*A)).mean > 0, "smoothing changes nothing here"
    check(found, [want[0], want[1], want[0]])


def test_a_profile_of_another_model_opens_no_engine(runner: scenario.Runner) -> None:
    other = updates.checkpoint("llama", 0)
    error = runner(refusal, "int8", other, profile=str(smooth_profile(updates.checkpoint(*A))))
    assert "the profile is of another model" in error


# -- what cannot be -------------------------------------------------------------------------------------


def refusal(name: str, model: str, **options: Any) -> str | None:
    import flashpatch

    def opens() -> None:
        with opened(name, model, options=options):
            pass

    error = updates.error(opens)
    flashpatch.disable(name)
    return error


def bad_weights(a: str, b: str) -> dict[str, Any]:
    import torch

    import flashpatch

    found: dict[str, Any] = {}
    with opened("int8", a) as llm:
        items = list(models.weights(b))
        name = "model.layers.1.mlp.down_proj.weight"
        spoilt = [(n, torch.full_like(t, torch.nan) if n == name else t) for n, t in items]
        found["nan"] = updates.error(lambda: updates.send(llm, [spoilt]))
        found["refused"] = updates.refusal(llm)
        part = [(n, t) for n, t in items if n != name]
        found["missing"] = updates.error(lambda: (updates.send(llm, [part]), updates.finish(llm)))
        updates.send(llm, [items])
        found["answers"] = engines.answers(llm)
    flashpatch.disable("int8")
    return found


def test_experts_are_refused_by_name(runner: scenario.Runner) -> None:
    error = runner(refusal, "int8", updates.checkpoint("qwen3-moe", 0))
    assert error is not None and "no kernel here for experts in int8" in error and "Use fp8 or bf16" in error


def test_bad_weights_are_named_and_a_complete_update_mends(runner: scenario.Runner) -> None:
    found = runner(bad_weights, updates.checkpoint(*A), updates.checkpoint(*B))
    for how, words in (("nan", "NaN or Inf"), ("missing", "did not come")):
        assert "model.layers.1.mlp.down_proj.weight" in found[how] and words in found[how]
    assert found["refused"] is not None
    assert engines.difference(found["answers"], int8(*B)).exact


# -- logprobs -------------------------------------------------------------------------------------------


def sampled(name: str, model: str, **options: Any) -> dict[str, Any]:
    """Logprobs of tokens drawn at temperature 0.5 from the 4 likeliest, and the mode the engine is in."""
    from vllm import SamplingParams

    import flashpatch
    from flashpatch import ledger

    with opened(name, model, options=options) as llm:
        parameters = SamplingParams(
            temperature=0.5, top_k=4, seed=1, max_tokens=8, logprobs=4, ignore_eos=True, detokenize=False
        )
        [output] = llm.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, parameters, use_tqdm=False)
        steps = [[entry.logprob for entry in step.values()] for step in output.outputs[0].logprobs]
        dtype = str(engines.inner_model(llm).logits_processor.head_dtype)
    notes = ledger.notes()
    flashpatch.disable(name)
    rows = [sorted(row)[-4:] for row in steps]
    return dict(rows=rows, head=dtype, mode=notes["logprobs"], lm_head=notes.get("lm_head"))


def test_logprobs_are_those_that_tokens_were_drawn_with(runner: scenario.Runner) -> None:
    from math import exp

    a = updates.checkpoint(*A)
    exact = runner(sampled, "bf16", a, lm_head="float32")
    assert exact["mode"] == "processed_logprobs"
    assert exact["lm_head"] == "float32" and exact["head"] == "torch.float32"
    for row in exact["rows"]:
        assert sum(map(exp, row)) == pytest.approx(1, abs=1e-5)  # the 4 that could be drawn are all there is
    raw = runner(sampled, "bf16", a, logprobs="asked")
    assert raw["mode"] == "raw_logprobs" and raw["head"] == "torch.bfloat16"
    assert max(sum(map(exp, row)) for row in raw["rows"]) < 0.99
