"""verl's engines on two ranks send to verl's receivers: what stock verl loads without a word, and what we
say."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_lab
import pytest
import torch
import verl_job
import warm
import warm_ranks

from flashpatch.verify.probes.fsdp import job, probe

pytestmark = pytest.mark.verl

VICTIM = "model.layers.1.mlp.down_proj.weight"
WIDE = "model.layers.0.self_attn.q_proj.weight"
ACCIDENTS = {
    "bit": f"{VICTIM} has other values than the trainer's shards",
    "buffer": f"{VICTIM} has other values than the trainer's shards",
    "exchange": f"{VICTIM} has other values than the trainer's shards",
    "missing": f"{VICTIM} is missing",
    "stale": f"{VICTIM} is stale",
    "twice": f"{VICTIM} arrived twice",
    "extra": "model.norm.bias is extra",
    "shape": f"{VICTIM} has shape [1, 48, 71], the trainer's has [48, 71]",
    "dtype": f"{VICTIM} has dtype torch.float64, the trainer sent torch.float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    job.make_model(folder / "model")
    return folder / "model"


Carry = Callable[..., list[list[dict[str, Any]]]]


@pytest.fixture
def carry(model: Path, tmp_path: Path) -> Carry:
    """Carry out a plan; what the two trainers and the two rollout sides saw."""

    def run(plan: list[dict[str, Any]], names: str, **variables: str) -> list[list[dict[str, Any]]]:
        (tmp_path / "model").symlink_to(model)
        with warm_ranks.used((*warm.VERL_VLLM, "fsdp_accidents")) as patch:
            patch.setattr("os.environ", cpu_lab.environment(tmp_path, FLASHPATCH=names, **variables))
            problem = probe.run(tmp_path, plan).problem
        assert not problem, problem
        return [probe.report(tmp_path, part, rank) for part in ("trainer", "rollout") for rank in range(2)]

    return run


def weights(folder: Path, part: str, rank: int, number: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{part}-{rank}-{number}.pt", weights_only=True)


def test_a_side_whose_other_has_ended_waits_no_longer(tmp_path):
    """A rank and its rollout worker: one that is killed answers nothing, and leaves no word that it failed."""
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.PULL) as quiet:
        quiet.bind("inproc://quiet")
        waiting = job._Socket(types.SimpleNamespace(socket=quiet), tmp_path / "failed")
        with pytest.raises(TimeoutError, match="the other side has failed"):
            waiting.recv()


def test_each_accident_is_named_and_nothing_is_committed(carry, tmp_path):
    """Under both FSDPs. The stale value is that of the sync before, so steps lie between."""
    plan = [{"strategy": "fsdp2"}]
    plan += [
        {"strategy": "fsdp2", "tamper": what, "victim": VICTIM, "step": what == "stale"} for what in ACCIDENTS
    ]
    tampered = {"strategy": "fsdp", "tamper": "bit", "victim": WIDE}
    plan += [{"strategy": "fsdp2"}, {"strategy": "fsdp"}, tampered]
    plan += [{"strategy": "fsdp2", "dtype": "bf16"}]
    seen = carry(plan, "fsdp")
    expected = ["", *ACCIDENTS.values(), "", "", f"{WIDE} has other values than the trainer's shards", ""]
    for side in seen[2:]:
        for entry, saw, words in zip(plan, side, expected, strict=True):
            assert words in saw["error"] and saw["committed"] == (not words), (entry, saw)
            if words:
                assert "fsdp.verl_vllm.receive_weights" in saw["error"] and "is refused" in saw["error"]
    for side in seen[:2]:
        for entry, saw, words in zip(plan, side, expected, strict=True):
            assert bool(saw["error"]) == bool(words), (entry, saw)
    for number in (0, len(ACCIDENTS) + 1, len(ACCIDENTS) + 2):
        for rank in range(2):
            sent, got = weights(tmp_path, "trainer", rank, number), weights(tmp_path, "rollout", rank, number)
            assert list(sent) == list(got) and all(torch.equal(sent[name], got[name]) for name in sent)


def test_an_adapter_and_its_base_are_audited(carry, tmp_path):
    """Under FSDP2; test_lora_job.py has FSDP1, whose adapters leave the trainer with another family alone."""
    victim = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    base = "model.layers.1.mlp.down_proj.base_layer.weight"
    same = {"strategy": "fsdp2", "lora_rank": 4}
    plan: list[dict[str, Any]] = [
        same,
        {**same, "adapter": True, "step": True},
        {**same, "adapter": True, "tamper": "bit", "victim": victim},
        {**same, "adapter": True, "step": True, "tamper": "stale", "victim": victim},
        {**same, "adapter": True, "tamper": "missing", "victim": victim},
        {**same, "tamper": "bit", "victim": base},
    ]
    other = "has other values than the trainer's shards"
    expected = ["", "", f"{victim} {other}", f"{victim} is stale", f"{victim} is missing", f"{base} {other}"]
    seen = carry(plan, "fsdp")
    for side in seen[:2]:
        for entry, saw, words in zip(plan, side, expected, strict=True):
            assert bool(saw["error"]) == bool(words), (entry, saw)
    for side in seen[2:]:
        for entry, saw, words in zip(plan, side, expected, strict=True):
            assert words in saw["error"] and saw["committed"] == (not words), (entry, saw)
    for number in (0, 1):
        sent, got = weights(tmp_path, "trainer", 0, number), weights(tmp_path, "rollout", 1, number)
        assert list(sent) == list(got) and all(torch.equal(sent[name], got[name]) for name in sent)
        assert (victim in sent) == bool(number) and (base in sent) == (not number)
    first, second = weights(tmp_path, "rollout", 0, 1), weights(tmp_path, "trainer", 0, 3)
    assert bool(first[victim].any()) and not torch.equal(first[victim], second[victim])


def test_both_meshes_of_both_fsdps_train_one_processes_model(carry, model, tmp_path):
    """2, 2 x 1 and 1 x 2: after a step every rollout side has the same weights as a single process;
    fsdp_size=2 of two ranks is verl's 1 x 2. And a replica that goes its own way is named before anything is
    committed."""
    plan = [
        {"strategy": strategy, "fsdp_size": size, "step": True}
        for strategy in ("fsdp", "fsdp2")
        for size in (-1, 1, 2)
    ]
    plan += [{"strategy": "fsdp2", "fsdp_size": 1, "step": True, "apart": True}]
    plan += [{"strategy": "fsdp", "fsdp_size": 1, "step": True, "apart": True}]
    seen = carry(plan, "fsdp")
    wanted = job.plain_step(model).state_dict()
    for number in range(6):
        assert [side[number]["error"] for side in seen] == [""] * 4, seen
        assert all(side[number]["committed"] for side in seen[2:])
        for rank in range(2):
            got = weights(tmp_path, "rollout", rank, number)
            worst = max((got[name] - value).abs().max().item() for name, value in wanted.items())
            assert worst < 1e-5, (plan[number], worst)
    assert [seen[0][number]["mesh"] for number in range(3)] == [[2], [2, 1], [2]]
    for number in (6, 7):
        assert not any(side[number]["committed"] for side in seen[2:])
        for side in seen[:2]:
            assert "differs between replica 0 and 1" in side[number]["error"], side[number]


@pytest.mark.full
def test_options(carry, tmp_path):
    """Reported and loaded; every second sync looked at."""
    plan = [
        {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
        {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
        {"strategy": "fsdp2"},
    ]
    seen = carry(plan, "fsdp", config='[fsdp]\naudit = "report"\naudit_every = 2\n')
    assert all(saw["error"] == "" for side in seen for saw in side)
    assert all(saw["committed"] for side in seen[2:] for saw in side)
    for rank in range(2):
        assert not [name for name in weights(tmp_path, "rollout", rank, 0) if name.startswith("__flashpatch")]
        log = (tmp_path / f"rollout-{rank}.log").read_text()
        assert log.count(f"{VICTIM} has other values") == 1
    received = [note for note in verl_job.audits(tmp_path) if "failed" in note]
    assert len(received) == 2
    assert all((note["sync"], note["audited"], note["failed"]) == (3, 2, 1) for note in received), received
