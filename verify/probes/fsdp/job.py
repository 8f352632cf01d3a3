"""Run a rank of the probe: build verl's FSDP engine, step and send to a rollout worker.

`rank` sends to a process that it forks, `on_sglang` to SGLang's engine. ``plan.json`` lists the transfers, each with
``strategy`` "fsdp" or "fsdp2", ``fsdp_size``, ``dtype`` and ``lora_rank`` of the engine, which is reused if unchanged; ``adapter`` (not
the base is sent); ``step`` (an optimizer step is taken first); and ``tamper``, a fault injected in transit, "bit" in the gathered
tensor or "buffer", with its ``victim``.

With forked workers each side writes what it saw as ``trainer-RANK.json`` and ``rollout-RANK.json``, and the worker the weights that it got
for each entry of the plan as ``.pt`` beside it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor

BUCKET = 1  # MiB, or tensors to SGLang
TIMEOUT = 300.0  # seconds that one side waits for the other; stock verl waits for ever
BATCH, LENGTH, VOCABULARY = 4, 8, 96
RATE = 0.05

Plan = list[dict[str, Any]]


def rank(workdir: Path, seen: dict[str, Any]) -> None:
    verl_actor.on_cpu("cpu")
    import verl.workers.engine
    import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer  # noqa: F401

    fork = multiprocessing.get_context("fork")
    sent = fork.Event()
    worker = fork.Process(target=_run, args=(rollout, workdir, sent), daemon=True)
    worker.start()  # what both import takes longer than all else
    _run(trainer, workdir)
    sent.set()
    worker.join()
    if worker.exitcode:
        raise RuntimeError(f"the rollout worker ended with status {worker.exitcode}")


def _run(part: Callable[[Path, int, Plan], Plan], workdir: Path, sent: Any = None) -> None:
    """Run ``trainer`` or ``rollout``, and write what it saw; a worker stays until all is sent, as with it Python would take the
    shared memory from its sender."""
    number = int(os.environ["RANK"])
    seen = part(workdir, number, json.loads((workdir / "plan.json").read_text()))
    (workdir / f"{part.__name__}-{number}.json").write_text(json.dumps(seen))
    if sent is not None:
        sent.wait(TIMEOUT)


def make_model(path: Path, **sizes: Any) -> None:
    """Save a small random Qwen2, whose rows do not divide evenly by two."""
    plain = dict(vocab_size=VOCABULARY + 1, hidden_size=48, intermediate_size=71, max_position_embeddings=64)
    verl_actor.write_model(path, std=0.08, **{**plain, **sizes})


def batch() -> torch.Tensor:
    """Return the whole batch of token ids [BATCH, LENGTH], the same in every process."""
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % VOCABULARY


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def plain_step(path: Path, clip: float = 1.0) -> Any:
    """Return the model after one step of a single process without verl and FSDP."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss(model, batch()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return model


class _Engines:
    """The engine that the plan asks for, at each transfer."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._engine: Any = None
        self._built: dict[str, Any] = {}

    def stepped(self, entry: dict[str, Any]) -> Any:
        """Return the engine of an entry, after its step."""
        wanted = {"fsdp_size": -1, "model_dtype": entry.get("dtype", "fp32")}
        wanted |= {key: entry[key] for key in ("strategy", "fsdp_size", "lora_rank") if key in entry}
        if wanted != self._built:
            self._engine = verl_actor.engine(model=self._workdir / "model", rate=RATE, **wanted)
            self._built = wanted
        if entry.get("step"):
            shards = batch().chunk(int(os.environ["WORLD_SIZE"]))
            self._engine.module.train()
            self._engine.optimizer_zero_grad()
            loss(self._engine.module, shards[int(os.environ["RANK"])]).backward()
            self._engine.optimizer_step()
        return self._engine


def trainer(workdir: Path, rank: int, plan: Plan) -> Plan:
    """Build engines, step and send as planned; return an entry per transfer."""
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray(timeout_second=120)
    seen: Plan = []
    engines = _Engines(workdir)
    for number, entry in enumerate(plan):
        engine = engines.stepped(entry)
        saw: dict[str, Any] = {"mesh": list(engine.device_mesh.shape), "error": ""}
        try:
            weights, _ = engine.get_per_tensor_param(base_sync_done=entry.get("adapter", False))
            _send(workdir, rank, number, weights, entry)
        except Exception as error:
            saw["error"] = text_of(error)
            _failure(workdir, "trainer", rank, number).touch()
        seen.append(saw)
        if rank == 0:
            jobs.tell(workdir, f"sync {number + 1} of {len(plan)} has ended")
    distributed.destroy_global_process_group()
    return seen


def on_sglang(workdir: Path, seen: dict[str, Any]) -> None:
    """Run a rank whose rollouts are SGLang's. Rank 0 sends to an engine, opened as any probe's, and notes what it answers; the others take
    part in the gathering alone, as ranks of a tensor-parallel rollout do."""
    verl_actor.on_cpu("cpu", "bf16")
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray(timeout_second=int(TIMEOUT))
    plan, engines = json.loads((workdir / "plan.json").read_text()), _Engines(workdir)
    served = None
    if os.environ["RANK"] == "0":
        served = jobs.engine().Engine(workdir / "model", dtype="float32")
        seen |= {"before": served.answers(), "transfers": []}
    for number, entry in enumerate(plan, 1):
        gathered = tampered(engines.stepped(entry).get_per_tensor_param()[0], entry)
        weights = [(name, tensor.detach().clone()) for name, tensor in gathered]
        if served is not None:
            saw: dict[str, Any] = {"error": ""}
            try:
                served.send(weights[at : at + BUCKET] for at in range(0, len(weights), BUCKET))
            except RuntimeError as error:
                saw["error"] = text_of(error)
            saw["answers"] = [] if saw["error"] else served.answers()
            seen["transfers"].append(saw)
            jobs.tell(workdir, f"sync {number} has ended")
    if served is not None:
        plain_step(workdir / "model").save_pretrained(workdir / "stepped")
        served.reload(workdir / "stepped")
        seen["wanted"] = served.answers()
    distributed.destroy_global_process_group()


def tampered(weights: Any, entry: dict[str, Any]) -> Iterator[Any]:
    """Yield the weights, with a bit flipped in the gathered tensor if the plan says so."""
    for name, tensor in weights:
        if entry.get("tamper") == "bit" and name == entry["victim"]:
            tensor = tensor.detach().clone()
            tensor.view(torch.uint8).view(-1)[5] ^= 4
        yield name, tensor


def _send(workdir: Path, rank: int, number: int, weights: Any, entry: dict[str, Any]) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class Sender(BucketedWeightSender):
        def _init_socket(self) -> None:
            super()._init_socket()
            victim = entry["victim"] if entry.get("tamper") == "buffer" else None
            self.socket = _Socket(self, _failure(workdir, "rollout", rank, number), victim)

    sender = Sender(_address(workdir, rank, number), bucket_size_mb=BUCKET, use_shm=True)
    asyncio.run(sender.async_send_weights(tampered(weights, entry)))


class _Socket:
    """Wrap a socket to stop waiting when the other side has failed; stock verl waits for ever. With a ``victim``, flip one bit
    of the shared memory just before the bucket is announced."""

    def __init__(self, owner: Any, failure: Path, victim: str | None = None) -> None:
        self._socket, self._owner, self._failure, self._victim = owner.socket, owner, failure, victim

    def send_pyobj(self, message: Any) -> None:
        meta = message.get("bucket_meta", {}).get(self._victim)
        if meta is not None:
            self._owner.buffer[meta["offset"] + 1] ^= 128
        self._socket.send_pyobj(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self) -> bytes:
        deadline, trainer = time.monotonic() + TIMEOUT, multiprocessing.parent_process()
        while True:
            is_alone = not (trainer.is_alive() if trainer else multiprocessing.active_children())
            over = self._failure.exists() or is_alone or time.monotonic() > deadline
            if self._socket.poll(50):  # also what was sent before the end
                return self._socket.recv()
            if over:
                raise TimeoutError("the other side has failed")

    def recv_pyobj(self) -> Any:
        return pickle.loads(self.recv())

    def close(self) -> None:
        self._socket.close(linger=1000)


def rollout(workdir: Path, rank: int, plan: Plan) -> Plan:
    """Receive with verl's own receiver and copy the weights; return an entry per transfer."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class Receiver(BucketedWeightReceiver):
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket = _Socket(self, _failure(workdir, "trainer", rank, number))

    seen = []
    for number in range(len(plan)):
        loaded: dict[str, torch.Tensor] = {}
        saw: dict[str, Any] = {"error": "", "committed": False}

        def on_bucket(weights: Any, is_last: bool, loaded: Any = loaded, saw: Any = saw) -> None:
            saw["committed"] = is_last
            loaded.update({name: tensor.clone() for name, tensor in weights})

        handle = _address(workdir, rank, number)
        receiver = Receiver(handle, device=torch.device("cpu"), use_shm=True)
        try:
            receiver.receive_weights(on_bucket_received=on_bucket)
        except Exception as error:
            saw["error"] = text_of(error)
            _failure(workdir, "rollout", rank, number).touch()
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
