"""Run a rank of the probe: build verl's FSDP engine, step and send to a rollout worker, a process that the rank forks.

Started by `flashpatch.verify.probes.fsdp.verl_probe`: ``main()`` with the working directory. The rank is in ``RANK``;
``plan.json`` lists the transfers as dictionaries:

- ``strategy`` "fsdp" or "fsdp2", ``fsdp_size``, ``dtype`` and ``lora_rank`` of the engine; unchanged, the engine is reused;
- ``adapter``: whether the adapter is sent, not the base;
- ``step``: whether to take an optimizer step first;
- ``apart``: whether rank 1 alone then changes its weights;
- ``tamper``: the fault injected in transit, see `tampered`; ``victim``: the tensor it hits.

Each side writes what it saw as ``trainer-RANK.json`` and ``rollout-RANK.json``, and the weights that it had
as ``.pt`` beside it, for each entry of the plan.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes.flowrl.tiny import untrained

BUCKET = 1  # MiB
TIMEOUT = 300.0  # seconds that one side waits for the other; stock verl waits for ever
BATCH, LENGTH, VOCABULARY = 4, 8, 96
RATE = 0.05


def main() -> None:
    """Run a rank and its rollout worker in the directory ``sys.argv[1]``; without an accelerator enable family cpu."""
    import flashpatch

    if not torch.accelerator.is_available():
        flashpatch.enable("cpu")
    import verl.workers.engine
    import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer  # noqa: F401

    worker = multiprocessing.get_context("fork").Process(target=_run, args=(rollout,), daemon=True)
    worker.start()  # what both import takes longer than all else
    _run(trainer)
    worker.join()
    sys.exit(worker.exitcode)


def _run(part: Callable[[Path, int, list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Run ``trainer`` or ``rollout``, and write what it saw."""
    workdir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    seen = part(workdir, rank, json.loads((workdir / "plan.json").read_text()))
    (workdir / f"{part.__name__}-{rank}.json").write_text(json.dumps(seen))


def make_model(path: Path, layers: int = 2, dtype: str = "float32", **sizes: int) -> None:
    """Save a small random Qwen2, whose rows do not divide evenly by two, in Hugging Face's format."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY + 1, "hidden_size": 48, "intermediate_size": 71, **sizes}
    model = untrained(num_hidden_layers=layers, **sizes).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.08)
    model.save_pretrained(path)


def batch() -> torch.Tensor:
    """Return the whole batch of token ids [BATCH, LENGTH], the same in every process."""
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCABULARY


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token cross entropy of a batch."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def plain_step(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights after one step of a single process without verl and FSDP."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss(model, batch()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def build(
    path: Path,
    strategy: str,
    fsdp_size: int = -1,
    dtype: str = "fp32",
    lora_rank: int = 0,
    rate: float = RATE,
    **settings: Any,
) -> Any:
    """Return verl's own FSDP engine, initialized, with plain gradient descent; ``settings`` are further ones of FSDP."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(
            path=str(path),
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            lora_rank=lora_rank,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            fsdp_size=fsdp_size,
            model_dtype=dtype,
            use_torch_compile=False,
            **{"mixed_precision": full, **settings},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=rate, optimizer="SGD", weight_decay=0.0, clip_grad=1.0, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def step(engine: Any, rank: int, world: int) -> None:
    """Take one optimizer step of verl's engine on this rank's shard of the batch."""
    engine.module.train()
    engine.optimizer_zero_grad()
    loss(engine.module, batch().chunk(world)[rank]).backward()
    engine.optimizer_step()


def trainer(workdir: Path, rank: int, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build engines, step and send as planned; return an entry per transfer."""
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray(timeout_second=120)
    seen, engine, built, old = [], None, None, {}
    for number, entry in enumerate(plan):
        layout = entry["strategy"], entry.get("fsdp_size", -1)
        wanted = (*layout, entry.get("dtype", "fp32"), entry.get("lora_rank", 0))
        if wanted != built:
            engine, built = build(workdir / "model", *wanted), wanted
        if entry.get("step"):
            step(engine, rank, int(os.environ["WORLD_SIZE"]))
        if entry.get("apart") and rank:
            with torch.no_grad():
                next(engine.module.parameters()).add_(1.0)
        saw: dict[str, Any] = {"mesh": list(engine.device_mesh.shape), "error": ""}
        kept: dict[str, torch.Tensor] = {}
        try:
            weights, _ = engine.get_per_tensor_param(base_sync_done=entry.get("adapter", False))
            _send(workdir, rank, number, tampered(_noted(weights, kept), entry, old), entry)
        except Exception as error:
            saw["error"] = text_of(error)
            _failure(workdir, "trainer", rank, number).touch()
        torch.save(kept, workdir / f"trainer-{rank}-{number}.pt")
        old = kept
        seen.append(saw)
    distributed.destroy_global_process_group()
    return seen


def _noted(weights: Any, kept: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not name.startswith("__flashpatch"):
            kept[name] = tensor.detach().clone()
        yield name, tensor


def tampered(weights: Any, entry: dict[str, Any], old: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Yield the weights with a fault injected: a bit flipped in the gathered tensor, two elements exchanged, a
    tensor left out, sent twice or stale, an extra one, or another shape or dtype."""
    what, victim = entry.get("tamper"), entry.get("victim", "model.norm.weight")
    for name, tensor in weights:
        hit = what is not None and name == victim
        if hit and what == "missing":
            continue
        if hit and what == "stale":
            tensor = old[name]
        if hit and what in ("bit", "exchange", "shape", "dtype"):
            tensor = tensor.detach().clone()
        if hit and what == "bit":
            tensor.view(torch.uint8).view(-1)[5] ^= 4
        if hit and what == "exchange":
            flat = tensor.view(-1)
            flat[[1, 2]] = flat[[2, 1]]
        if hit and what == "shape":
            tensor = tensor.reshape(1, *tensor.shape)
        if hit and what == "dtype":
            tensor = tensor.to(torch.float64)
        yield name, tensor
        if hit and what == "extra":
            yield "model.norm.bias", tensor
        if hit and what == "twice":
            for i in range(3):  # enough to fill a bucket: names within one are unique anyway
                yield f"model.filler.{i}", torch.zeros(BUCKET << 18)
            yield name, tensor


def _send(workdir: Path, rank: int, number: int, weights: Any, entry: dict[str, Any]) -> None:
    """Send with verl's own sender, over shared memory."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class Sender(BucketedWeightSender):
        def _init_socket(self) -> None:
            super()._init_socket()
            victim = entry["victim"] if entry.get("tamper") == "buffer" else None
            self.socket = _Socket(self, _failure(workdir, "rollout", rank, number), victim)

    sender = Sender(_address(workdir, rank, number), bucket_size_mb=BUCKET, use_shm=True)
    asyncio.run(sender.async_send_weights(weights))


class _Socket:
    """Wrap a socket to stop waiting when the other side has failed; stock verl waits for ever.

    With a ``victim``, flip one bit of the shared memory just before the bucket is announced.
    """

    def __init__(self, owner: Any, failure: Path, victim: str | None = None) -> None:
        self._socket, self._owner, self._failure, self._victim = owner.socket, owner, failure, victim

    def send_pyobj(self, message: Any) -> None:
        meta = message.get("bucket_meta", {}).get(self._victim)
        if meta is not None:
            self._owner.buffer[meta["offset"] + 1] ^= 128
        self._socket.send_pyobj(message)

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def recv(self) -> bytes:
        deadline = time.monotonic() + TIMEOUT
        while True:
            over = self._failure.exists() or _is_alone() or time.monotonic() > deadline
            if self._socket.poll(50):  # also what was sent before the end
                return self._socket.recv()
            if over:
                raise TimeoutError("the other side has failed")

    def recv_pyobj(self) -> Any:
        return pickle.loads(self.recv())

    def close(self) -> None:
        self._socket.close(linger=1000)


def _is_alone() -> bool:
    """Return whether the other process of this rank has ended."""
    trainer = multiprocessing.parent_process()
    return not (trainer.is_alive() if trainer else multiprocessing.active_children())


def rollout(workdir: Path, rank: int, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Receive with verl's own receiver and copy the weights; return an entry per transfer."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class Receiver(BucketedWeightReceiver):
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket = _Socket(self, _failure(workdir, "trainer", rank, number))

    seen = []
    for number in range(len(plan)):
        loaded: dict[str, torch.Tensor] = {}
        calls: list[bool] = []

        def on_bucket(weights: Any, is_last: bool, loaded: Any = loaded, calls: Any = calls) -> None:
            calls.append(is_last)
            loaded.update({name: tensor.clone() for name, tensor in weights})

        handle = _address(workdir, rank, number)
        receiver = Receiver(handle, device=torch.device("cpu"), use_shm=True)
        saw: dict[str, Any] = {"error": ""}
        try:
            receiver.receive_weights(on_bucket_received=on_bucket)
        except Exception as error:
            saw["error"] = text_of(error)
            _failure(workdir, "rollout", rank, number).touch()
        saw["committed"] = bool(calls) and calls[-1]
        saw["strange"] = [name for name in loaded if name.startswith("__flashpatch")]
        torch.save(loaded, workdir / f"rollout-{rank}-{number}.pt")
        seen.append(saw)
    return seen


def _address(workdir: Path, rank: int, number: int) -> str:
    return f"ipc://{workdir}/s{rank}-{number}"


def _failure(workdir: Path, part: str, rank: int, number: int) -> Path:
    """Return the path of a file that exists once one side of a rank has failed."""
    return workdir / f"failed-{part}-{rank}-{number}"


def text_of(error: BaseException) -> str:
    """Return the message of the PatchError in the chain, else of the error: verl 0.9.1 raises another in cleanup."""
    from flashpatch.errors import PatchError

    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, PatchError):
            return f"PatchError: {chain}"
        chain = chain.__cause__ or chain.__context__
    return f"{type(error).__name__}: {error}"
