"""Driver, trainer and rollouts of a sync of differences in one process, each with ends of its own; Ray is left out."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl import delta_sync, delta_versions

CONFIG = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="gloo"))


class Process:
    """A process: what runs in it finds its own ends."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.ends, self.rank, self.carries = delta_sync.DeltaState(), 0, True
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    async def _call(self, function: Any) -> Any:
        return await self.within(self.resolved(function, self))

    async def resolved(self, function: Any, *args: Any) -> Any:
        return function(*args)

    async def within(self, coroutine: Any) -> Any:
        """Await to the end, with this process's ends in place."""
        before = delta_sync.STATE, delta_sync.is_on
        delta_sync.STATE, delta_sync.is_on = self.ends, lambda: self.carries
        try:
            return await coroutine
        finally:
            delta_sync.STATE, delta_sync.is_on = before


class Transfer:
    """A checkpoint engine within one process."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.wire = rank, []

    async def send_weights(self, weights: Any, global_steps: int) -> dict[str, float]:
        taken = [(name, tensor.clone()) for name, tensor in weights]
        if self.rank == 0:
            self.wire[:] = taken
            return {"lab/bytes": float(sum(tensor.nbytes for _, tensor in taken))}
        return {}

    async def receive_weights(self, global_steps: int) -> Any:
        for item in self.wire:
            yield item


class Client:
    """A rollout's client of its server."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.loads, self.faulty = 0, False

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        self.loads += 1
        held = {}
        async for name, tensor in weights:
            if self.faulty:
                raise LookupError("cannot place this tensor")
            held[name] = tensor.clone()
        self.held = held


class Job:
    """Two trainer ranks, of which the first sends, and two rollouts."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.weights = {f"w{i}": torch.randn(3000, generator=self.random).bfloat16() for i in range(4)}
        export = SimpleNamespace(get_per_tensor_param=self.export)
        self.transfer = Transfer()
        self.trainers = [
            Process(
                config=SimpleNamespace(rollout=CONFIG, model={}),
                actor=SimpleNamespace(engine=export),
                checkpoint_engine=self.transfer if rank == 0 else Transfer(-1),
            )
            for rank in range(2)
        ]
        self.rollouts = [self.rollout() for _ in range(2)]
        self.manager = SimpleNamespace(
            backend="gloo",
            actor_wg=SimpleNamespace(_workers=self.trainers),
            replicas=[SimpleNamespace(workers=[one]) for one in self.rollouts],
        )
        self.faults: list[Any] = []  # called between the driver's plan and the transfer

    def export(self) -> tuple[Any, None]:
        return delta_sync.unfuse_moe_params(lambda weights: weights, iter(list(self.weights.items()))), None

    def rollout(self) -> Process:
        return Process(
            rollout_config=CONFIG, model_config={}, checkpoint_engine=self.transfer, server_adapter=Client()
        )

    async def stock(self, manager: Any, global_steps: int) -> dict[str, float]:
        """What verl's manager does."""
        while self.faults:
            self.faults.pop()()
        merged: dict[str, float] = {}
        for one in self.trainers:
            merged.update(
                await one.within(
                    delta_sync.actor_update_weights_delta(self.unpatched, one, global_steps, "gloo")
                )
            )
        for one in self.rollouts:
            await one.within(delta_sync.rollout_update_weights_delta(self.unpatched, one, global_steps))
        return merged

    async def unpatched(self, worker: Any, global_steps: int, *mode: str) -> dict[str, float]:
        if worker in self.trainers:
            weights, _ = worker.actor.engine.get_per_tensor_param()
            return await worker.checkpoint_engine.send_weights(weights, global_steps=global_steps)
        weights = worker.checkpoint_engine.receive_weights(global_steps=global_steps)
        await worker.server_adapter.update_weights(weights, global_steps, "named_tensors")
        return {}

    def sync(self) -> dict[str, float]:
        for name, tensor in self.weights.items():
            chosen = torch.rand(tensor.shape, generator=self.random) < 0.01
            self.weights[name] = torch.where(chosen, tensor + 1, tensor)
        return delta_versions.checkpoint_manager_update_weights_delta(self.stock, self.manager, 1)

    def right(self) -> bool:
        return all(
            list(one.server_adapter.held) == list(self.weights)
            and all(torch.equal(one.server_adapter.held[name], self.weights[name]) for name in self.weights)
            for one in self.rollouts
        )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(delta_sync, "is_on", lambda: True)
    monkeypatch.setattr(delta_versions, "VERSIONS", delta_versions.Versions())
    return Job()


def test_the_first_sync_brings_everything_and_the_next_what_changed(job):
    assert job.sync()["sync/wire_share"] > 1 and job.right()
    for _ in range(3):
        found = job.sync()
        assert found["sync/wire_share"] < 0.1 and 0 < found["sync/changed_share"] < 0.02 and job.right()
        assert found["lab/bytes"] == found["sync/wire_bytes"]
    assert job.trainers[1].ends.sender.version is None  # it keeps no copy


def test_a_sync_in_which_nearly_all_changed_says_why(job, caplog):
    job.weights = {name: tensor.float() for name, tensor in job.weights.items()}
    job.sync()
    job.sync()
    assert "delta_sync saves nothing" not in caplog.text
    job.weights = {name: tensor + 1e-3 for name, tensor in job.weights.items()}
    assert job.sync()["sync/changed_share"] > 0.99 and job.right()
    assert "delta_sync saves nothing (rollouts did not say which weights may come in bf16)" in caplog.text


def test_what_no_rollout_holds_in_float32_comes_in_bf16_from_the_second_sync_on(job, caplog):
    masters = {name: tensor.float() + 1e-4 for name, tensor in job.weights.items()}
    job.weights = dict(masters)
    assert job.sync()["sync/wire_share"] > 1
    delta_versions.VERSIONS.learn({"w1"})
    delta_versions.VERSIONS.learn(set())  # bf16 has come: what was wide stays so
    for _ in range(2):
        job.weights = {name: tensor + 1e-6 for name, tensor in job.weights.items()}
        found = job.sync()
        held = job.rollouts[0].server_adapter.held
        assert {name for name in held if held[name].dtype == torch.float32} == {"w1"}
        assert all(torch.equal(held[name], job.weights[name].to(held[name].dtype)) for name in held)
        bf16 = sum(tensor.numel() for name, tensor in job.weights.items() if name != "w1") * 2
        assert found["sync/wire_bytes"] < job.weights["w1"].nbytes + 0.15 * bf16
    delta_versions.VERSIONS.learn(None)
    job.sync()
    assert job.right()  # in float32 again, since one rollout cannot tell


def test_a_caller_that_awaits_gets_a_coroutine(job):
    async def awaits():
        return await delta_versions.checkpoint_manager_update_weights_delta(job.stock, job.manager, 1)

    assert asyncio.run(awaits())["sync/wire_share"] > 1 and job.right()


def test_without_the_option_all_bytes_move_each_time(job, monkeypatch):
    monkeypatch.setattr(delta_sync, "is_on", lambda: False)
    whole = sum(tensor.nbytes for tensor in job.weights.values())
    for _ in range(2):
        assert asyncio.run(job.sync()) == {"lab/bytes": whole} and job.right()


def test_a_rollout_without_a_version_gets_everything_in_the_same_call(job, caplog):
    job.sync()
    job.sync()
    job.rollouts[1].ends.receiver.forget()
    assert job.sync()["sync/wire_share"] > 1 and job.right()
    assert "not all rollouts hold one version, so all weights are sent" in caplog.text
    assert [one.server_adapter.loads for one in job.rollouts] == [3, 3]
    assert job.sync()["sync/wire_share"] < 0.1 and job.right()


@pytest.mark.parametrize("fault", ["forgets", "flips"])
def test_what_a_rollout_refuses_is_answered_in_the_same_call(job, caplog, fault):
    job.sync()
    ends = job.rollouts[1].ends

    def happens():
        if fault == "forgets":
            ends.receiver.forget()
        else:
            ends.receiver._copies["w2"].view(torch.int16)[5] ^= 1

    job.faults.append(happens)
    assert job.sync()["sync/wire_share"] > 1 and job.right()
    assert "a rollout refused a difference, so all weights are sent: rollout rank 1" in caplog.text
    said = "this copy is of none" if fault == "forgets" else "1 weights differ from the sender's, such as w2"
    assert said in caplog.text
    assert [one.server_adapter.loads for one in job.rollouts] == [3, 2]
    assert job.sync()["sync/wire_share"] < 0.1 and job.right()


def test_a_load_that_fails_is_followed_by_everything(job):
    job.sync()
    job.rollouts[1].server_adapter.faulty = True
    with pytest.raises(LookupError):
        job.sync()
    job.rollouts[1].server_adapter.faulty = False
    assert job.sync()["sync/wire_share"] > 1 and job.right()


def test_a_sync_that_failed_anywhere_is_followed_by_everything_from_all_ranks(job):
    """Ranks of nccl that relay must send the same sizes as the first."""
    job.sync()
    job.faults.append(lambda: job.trainers.append(None))
    with pytest.raises(AttributeError):
        job.sync()
    del job.trainers[2]
    held = {one.ends.receiver.version for one in job.rollouts}
    assert len(held) == 1 and None not in held and delta_versions.VERSIONS.last is None
    assert job.sync()["sync/wire_share"] > 1 and job.right()


def test_everything_that_arrives_damaged_is_an_error(job):
    class Flipping(Transfer):
        async def receive_weights(self, global_steps):
            for name, tensor in self.wire:
                yield name, tensor + 1 if name == "w1" else tensor

    flipping = Flipping()
    flipping.wire = job.transfer.wire
    job.rollouts[0].checkpoint_engine = flipping
    with pytest.raises(PatchError, match="1 weights differ from the sender's, such as w1"):
        job.sync()


@pytest.mark.parametrize(
    ("side", "said"), [("trainers", "trainer ranks \\[0\\]"), ("rollouts", "rollout ranks \\[0\\]")]
)
def test_a_process_without_flashpatch_is_named(job, side, said):
    getattr(job, side)[0].carries = False
    with pytest.raises(PatchError, match=f"{said} do not send or take differences"):
        job.sync()
