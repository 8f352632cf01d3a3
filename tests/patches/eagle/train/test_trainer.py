import pytest
import torch
from drafter_lab import capture, cut, embeddings_of, make_target

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
