from pathlib import Path

import pytest
import torch
from drafter_lab import capture, cut, embeddings_of, make_target

from flashpatch.patches.eagle.train.checkpoint import Checkpoints
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.pack import join, pack
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer


@pytest.fixture(scope="module")
def lesson():
    target = make_target()
    return target, pack(cut(capture(target, 12)), 100)


def make(target, kind="eagle", **recipe):
    drafter = make_drafter(drafter_config(target.config, kind))
    return Trainer(drafter, embeddings_of(target), Recipe(**recipe))


@pytest.mark.parametrize("kind", ["eagle", pytest.param("eagle3", marks=pytest.mark.full)])
def test_a_drafter_from_scratch_learns_what_was_captured(kind):
    target = make_target()
    rows = pack(cut(capture(target, 12), auxiliary=kind == "eagle3"), 400)
    trainer = make(target, kind, rate=5e-3, tokens=0.5)
    before = trainer.backward(rows)
    for _ in range(60):
        trainer.step(rows)
    after = trainer.backward(rows)
    assert after["agreement"] > 0.5 > 0.2 > before["agreement"], (before, after)
    assert after["tokens"] < before["tokens"]


def test_resumed_training_is_the_uninterrupted_one(lesson, tmp_path):
    target, rows = lesson
    trainer = make(target, rate=1e-2)
    for row in rows[:2]:
        trainer.step([row])
    saved = Checkpoints(tmp_path)
    saved.save(trainer)
    trainer.step(rows[:1])  # goes on while the checkpoint is written
    saved.settle()
    assert saved.failed == 0, saved.problem
    assert saved.newest() == tmp_path / "step-2.pt"
    straight = trainer.step(rows[1:])
    other = make(target, rate=1e-2)
    assert Checkpoints(tmp_path).resume(other)
    assert other.count == 2
    other.step(rows[:1])
    assert other.step(rows[1:]) == straight
    for name, weight in trainer.weights().items():
        assert torch.equal(weight, other.weights()[name]), name


def test_old_checkpoints_go_and_a_half_written_one_does_not_count(lesson, tmp_path):
    target, rows = lesson
    trainer, saved = make(target), Checkpoints(tmp_path, keep=2)
    for _ in range(4):
        trainer.step(rows[:1])
        saved.save(trainer)
    saved.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3.pt", "step-4.pt"]
    (tmp_path / ".partial").write_bytes(b"of step 10")
    assert Checkpoints(tmp_path).newest() == tmp_path / "step-4.pt"


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(lesson, tmp_path, monkeypatch):
    target, rows = lesson
    trainer, saved = make(target), Checkpoints(tmp_path)
    trainer.step(rows[:1])
    saved.save(trainer)
    saved.settle()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    trainer.step(rows[:1])
    saved.save(trainer)
    saved.settle()
    assert saved.failed == 1 and "No space left" in saved.problem
    assert saved.newest() == tmp_path / "step-1.pt" and list(tmp_path.iterdir()) == [saved.newest()]
    assert trainer.step(rows[:1])["positions"] > 0


def test_a_gradient_that_is_not_finite_changes_nothing(lesson):
    target, rows = lesson
    trainer = make(target)
    trainer.step(rows[:1])
    before = trainer.weights()
    poisoned = join(rows[:1])
    poisoned.states[3] = float("nan")
    poisoned.targets[3] = float("nan")
    trainer.step([poisoned])
    assert trainer.skipped == 1
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())


def test_nothing_to_learn_is_no_step(lesson):
    trainer = make(lesson[0])
    assert trainer.step([]) == {"positions": 0.0}
    assert trainer.count == 0
