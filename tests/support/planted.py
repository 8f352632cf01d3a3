"""Faults that are planted in the workers of a running vLLM engine, or in its checkpoint, for ``flashpatch-verify exact`` to name, and
healthy engines. ``python planted.py PRECISION [PART OF A NAME ...]`` prints the table of docs/measured/planted.md."""

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from exact_sweep import _trainers

L0, L1, ROPE = "model.layers.0", "model.layers.1", "model.layers.0.self_attn.rotary_emb"
TP2: dict[str, Any] = dict(tensor_parallel_size=2)
CUT = dict(enable_chunked_prefill=True, max_num_batched_tokens=16, max_num_seqs=1)
EXPERTS = dict(num_experts=64, num_experts_per_tok=8)
Plant = Callable[[Any], None]
_undone = contextlib.ExitStack()


def _part(worker: Any, name: str) -> Any:
    return worker.get_model().get_submodule(name)


def _out(name: str, change: Callable[[torch.Tensor], torch.Tensor], ranks: tuple[int, ...] = (0, 1)) -> Plant:
    """Let a module return what ``change`` makes of its first tensor."""

    def after(_: Any, args: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else None if out is None else change(out)

    return lambda worker: worker.rank in ranks and _part(worker, name).register_forward_hook(after)


def _in(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def before(_: Any, args: Any) -> Any:
        return change(args[0]), *args[1:]

    return lambda worker: _part(worker, name).register_forward_pre_hook(before)


def _holds(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], ranks: tuple[int, ...] = (0, 1)
) -> Plant:
    def plant(worker: Any) -> None:
        of, _, last = name.rpartition(".")
        held = getattr(_part(worker, of), last).data
        held.copy_(change(held.clone())) if worker.rank in ranks else None

    return plant


def _sampler(name: str, other: Callable[..., Any]) -> Plant:
    def plant(worker: Any) -> None:
        from vllm.v1.sample.sampler import Sampler

        original = getattr(Sampler, name)
        wrong = staticmethod(lambda *args, **kwargs: other(original, *args, **kwargs))
        _undone.enter_context(mock.patch.object(Sampler, name, wrong))

    return plant


def _no_top_p(worker: Any) -> None:
    own = worker.model_runner.sampler.topk_topp_sampler
    forward = own.forward
    own.forward = lambda logits, seeds, k, p: forward(logits, seeds, k, None)


def _bias(worker: Any) -> None:
    own = _part(worker, f"{L1}.mlp.down_proj")
    _out(f"{L1}.mlp.down_proj", lambda out: out - own.bias)(worker)


def _after(
    count: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    calls = itertools.count()
    return lambda out: change(out) if next(calls) > count else out


def _dead(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What was returned for as many tokens before, after so many calls."""
    calls, kept = itertools.count(), dict[Any, torch.Tensor]()
    return lambda out: kept.setdefault(out.shape, out.clone()) if next(calls) > count else out


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    """A fault of the engine's checkpoint."""

    def plant(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        (file,) = path.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    plant.of_checkpoint = True
    return plant


def _expert(number: int, change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Any:
    at = f"{L1}.mlp.experts.{number}.{part}"
    return _tensors(lambda own: [own[name].copy_(change(own[name])) for name in own if name.startswith(at)])


def _alone(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """In decode steps alone."""
    return lambda out: change(out) if len(out) == 1 else out


def _row(out: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(out.shape[-1]) == 11, out * 1.5, out)


def _roll(own: torch.Tensor) -> torch.Tensor:
    return own.roll(1, 0)


# fmt: off
FAULTS: dict[str, tuple[Any, ...]] = {
    "rotary positions beyond 200 are one less": ("llama", "o_proj", _in(ROPE, lambda at: at - (at > 200).long())),
    "cosines of positions 300 to 340 are others":
        ("llama", "o_proj", _holds(f"{ROPE}.cos_sin_cache", lambda own: torch.cat([own[:300], own[301:342], own[341:]]))),
    "rotary positions are one less in decode steps": ("llama", "o_proj", _in(ROPE, _alone(lambda at: at - 1))),
    "a norm is stale": ("llama", "post_attention", _holds(f"{L1}.post_attention_layernorm.weight", _roll)),
    "two heads of queries are exchanged":
        ("llama", "qkv_proj", _out(f"{L1}.self_attn.qkv_proj", lambda o: torch.cat([o[:, 64:128], o[:, :64], o[:, 128:]], 1))),
    "a matrix adds 1.05 times as much": ("llama", "down_proj", _out(f"{L1}.mlp.down_proj", lambda out: out * 1.05)),
    "one row of scales is 1.5 times as large": ("llama", "o_proj", _out(f"{L1}.self_attn.o_proj", _row)),
    "the bias of one matrix is left out": ("llama-biased", "down_proj", _bias),
    "the head is stale": ("llama", "logits", _out("logits_processor", lambda out: out.roll(1, -1))),
    "a row of the embedding is stale": ("llama", "embed_tokens", _tensors(lambda own: own["model.embed_tokens.weight"][3].fill_(0.1))),
    "a layer is stale": ("llama", "layers.1", _tensors(lambda own: [one.copy_(_roll(one)) for at, one in own.items() if L1 in at])),
    "attention returns 0.9 of it in decode steps": ("llama", "o_proj", _out(f"{L1}.self_attn.attn", _alone(lambda out: out * 0.9))),
    "the gate is wrong in decode steps": ("llama", "gate_up_proj", _out(f"{L0}.mlp.gate_up_proj", _alone(lambda out: out.roll(1, -1)))),
    "a norm is skipped in decode steps": ("llama", "gate_up_proj", _in(f"{L1}.mlp.gate_up_proj", _alone(lambda x: x * 1.3))),
    "a matrix adds 1.2 times as much after 20 calls": ("llama", "down_proj", _out(f"{L1}.mlp.down_proj", _after(20, lambda o: o * 1.2))),
    "a wrapper is dead after 30 calls": ("llama", "o_proj", _out(f"{L0}.self_attn.o_proj", _dead(30))),
    "one expert of 64 is another": ("qwen3-moe", "mlp", _expert(37, _roll)),
    "one expert of 64 adds 1.3 times as much": ("qwen3-moe", "mlp", _expert(5, lambda own: own * 1.3, "down_proj")),
    "the router is stale": ("qwen3-moe", "gate", _out(f"{L1}.mlp.gate", lambda out: out.roll(1, -1))),
    "a norm is stale on rank 1": ("llama", "post_attention", _holds(f"{L1}.post_attention_layernorm.weight", _roll, (1,)), TP2),
    "a matrix adds 1.2 times as much on rank 1": ("llama", "qkv_proj", _out(f"{L1}.self_attn.qkv_proj", lambda out: out * 1.2, (1,)), TP2),
    "top-p is ignored": ("llama", "sampler", _no_top_p),
    "the temperature is 1.5 times as high": ("llama", "sampler", _sampler("apply_temperature", lambda f, x, t, *r: f(x, t * 1.5, *r))),
    "penalties are ignored": ("llama", "sampler", _sampler("apply_penalties", lambda f, logits, *rest: logits)),
    "greedy requests get the second best": ("llama", "sampler", _sampler("greedy_sample", lambda f, x: x.topk(2).indices[:, 1])),
    "returned log-probabilities are others": ("llama", "returned", _sampler("compute_logprobs", lambda f, x: f(x * 0.97))),
}
"""By name: family of the model, a part of the place that is named, what plants the fault, and the engine's arguments if it has some."""
HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "a Llama": ("llama", {}), "a tied Qwen2": ("qwen2-tied", {}), "64 experts": ("qwen3-moe", {}), "windows": ("gemma3", {}),
    "biases": ("llama-biased", {}), "steps of 16 tokens": ("llama", CUT), "two ranks": ("llama", TP2),
    "scaled positions": ("llama3.1", {}), "prefix cache": ("llama", dict(enable_prefix_caching=True, block_size=32)),
}
# fmt: on


def certified(path: str, fault: str = "", **engine: Any) -> dict[str, Any]:
    """Return what is found of an engine in whose workers a fault is planted."""
    from vllm_lab import engines

    from flashpatch.verify.exact import command
    from flashpatch.verify.exact import engine as exact

    opened, shared = exact.opened, contextlib.nullcontext(_trainers())
    plant = FAULTS[fault][2] if fault else None

    @contextlib.contextmanager
    def spoilt(**arguments: Any) -> Any:
        with opened(**arguments) as llm:
            if plant and not hasattr(plant, "of_checkpoint"):
                llm.collective_rpc(_plant, args=(fault,))
            yield llm

    with (
        _undone,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(exact, "opened", spoilt),
        mock.patch.object(command, "ProcessPoolExecutor", lambda *_: shared),
        engines.forked() if "tensor_parallel_size" in engine else contextlib.nullcontext(),
    ):
        settings = {"kv_cache_memory_bytes": 16 << 20, **engine}
        if hasattr(plant, "of_checkpoint"):
            plant(Path(shutil.copytree(path, Path(folder, "served"))))
            settings["model"] = f"{folder}/served"
        return command.certify(path, "", settings).as_json()


def model(folder: Path, family: str) -> Path:
    from vllm_lab import models

    return models.checkpoint(folder, family, **(EXPERTS if family == "qwen3-moe" else {}))


def _plant(worker: Any, fault: str) -> None:
    FAULTS[fault][2](worker)


def main(precision: str, *parts: str) -> None:
    from vllm_lab import scenario

    folder = tempfile.mkdtemp()
    env = {} if precision == "bf16" else {"FLASHPATCH": precision, "FLASHPATCH_LEDGER": f"{folder}/ledger"}
    rows = [(name, name, family, dict(*engine)) for name, (family, _, _, *engine) in FAULTS.items()]
    rows += [(f"healthy: {name}", "", family, engine) for name, (family, engine) in HEALTHY.items()]
    with scenario.Runner(env=env) as runner:
        for name, fault, family, engine in rows:
            if parts and not any(part in name for part in parts):
                continue
            found = runner(certified, str(model(Path(folder), family)), fault, **engine)
            wrong = [place for place in found["places"] if not place["gap"] <= place["bound"]]
            said = found["problem"] or ", ".join(
                filter(None, [wrong[0][at] for at in ("name", "rank", "kind")] if wrong else [])
            )
            print(
                f"| {precision} | {name} | {said or 'agrees' + ', in part' * (not found['ok'])} |",
                found["not_compared"] or "",
                flush=True,
            )


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(*sys.argv[1:])
