"""Training over several draft steps: equal to drafting place by place, and worth its time."""

import pytest
import torch
from drafter_lab import capture, cut, embeddings_of, make_target, random_samples
from drafting import accepted, draft
from torch.nn import functional as F

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train import unroll
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.loss import step_sums
from flashpatch.patches.eagle.train.pack import join, pack
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer

STEPS = 4
KINDS = [("llama", "eagle3"), ("llama", "eagle"), ("qwen2", "eagle")]


def windows_with_holes(kind):
    """Windows of three requests in float64."""
    parts = cut(random_samples((15, 3, 9), 1), 8, auxiliary=kind == "eagle3")
    return [part.to("cpu", torch.float64) for part in parts]


def naive_losses(drafter, embeddings, parts, regress):
    """Sums of both losses, and positions, of each step: every drafting by itself, with the true tokens."""
    states, tokens, count = (torch.zeros(STEPS, dtype=torch.float64) for _ in range(3))
    for part in parts:
        for place in range(len(part)):
            if not part.seen[place]:
                continue
            steps = min(STEPS, len(part) - place)
            ids = part.next_ids[place:]
            outputs = draft(drafter, embeddings, part, place, steps, lambda step, _, ids=ids: int(ids[step]))
            for step, output in enumerate(outputs):
                if not part.learn[place + step]:
                    continue
                target, at = part.targets[place + step], F.one_hot(torch.tensor(step), STEPS)
                wanted = embeddings.logits(target).softmax(-1)
                tokens = tokens - at * (wanted * embeddings.logits(output).log_softmax(-1)).sum()
                states = states + at * regress * F.smooth_l1_loss(output, target)
                count = count + at
    return states, tokens, count


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_losses_and_gradients_are_those_of_draftings_one_by_one(family, kind, monkeypatch):
    monkeypatch.setattr(unroll, "CHUNK", 3)
    parts, target = windows_with_holes(kind), make_target(family).double()
    drafter = make_drafter(drafter_config(target.config, kind), dtype=torch.float64)
    embeddings = embeddings_of(target)
    share = torch.tensor([1.0, 0.7, 0.5, 0.3], dtype=torch.float64)

    def gradients(states, tokens):
        drafter.zero_grad()
        (share * (states + 0.1 * tokens)).sum().backward()
        return {name: p.grad.clone() for name, p in drafter.named_parameters()}

    states, tokens, count = naive_losses(drafter, embeddings, parts, kind == "eagle")
    wanted = gradients(states, tokens)
    row = join(parts)
    found = step_sums(drafter, embeddings, row, STEPS)
    assert [int(row.learn_at(step).sum()) for step in range(STEPS)] == count.tolist() and min(count) > 0
    # transformers' RMS norm and rotary tables are in single precision whatever the input is.
    torch.testing.assert_close(torch.stack([one.states for one in found]), states, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.stack([one.tokens for one in found]), tokens, rtol=1e-6, atol=1e-8)
    ours = gradients(torch.stack([o.states for o in found]), torch.stack([o.tokens for o in found]))
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        assert gradient.abs().sum() > 0


def test_the_gradient_of_attention_is_that_of_finite_differences():
    torch.manual_seed(0)

    def random_numbers(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    common, own = (1, 2, 5, 4), (1, 2, 2, 3, 4)
    given = [random_numbers(*shape) for shape in ((1, 4, 3, 4), common, common, own, own)]
    assert torch.autograd.gradcheck(lambda *them: unroll.attend(*them, mask, 0.5), given)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_first_step_is_what_it_was_whatever_follows(kind):
    row, target = join(windows_with_holes(kind)), make_target().double()
    drafter = make_drafter(drafter_config(target.config, kind), dtype=torch.float64)
    alone = step_sums(drafter, embeddings_of(target), row, 1)[0]
    first = step_sums(drafter, embeddings_of(target), row, 3)[0]
    assert all(
        torch.equal(getattr(alone, name), getattr(first, name)) for name in ("states", "tokens", "agreed")
    )


def test_the_loss_weighs_steps_by_the_decay_and_each_by_its_own_positions():
    target = make_target()
    rows = pack(cut(capture(target, 6), auxiliary=True), 100)
    drafter = make_drafter(drafter_config(target.config, "eagle3"))
    trainer = Trainer(drafter, embeddings_of(target), Recipe(tokens=0.5, ttt_steps=3, ttt_decay=0.5))
    found = trainer.backward(rows)
    parts = [step_sums(drafter, embeddings_of(target), row, 3) for row in rows]
    means = [
        sum(part[n].tokens.item() for part in parts) / sum(int(row.learn_at(n).sum()) for row in rows)
        for n in range(3)
    ]
    assert found["loss"] == pytest.approx(0.5 * (4 * means[0] + 2 * means[1] + means[2]) / 7, rel=1e-5)
    assert found["tokens"] == pytest.approx(means[0], rel=1e-5)
    assert {"agreement", "agreement_2", "agreement_3"} <= found.keys()


def test_windows_too_short_for_a_step_teach_the_others():
    target = make_target()
    rows = pack(cut(capture(target, 3), 2, auxiliary=True), 100)
    trainer = Trainer(
        make_drafter(drafter_config(target.config, "eagle3")), embeddings_of(target), Recipe(ttt_steps=4)
    )
    found = trainer.step(rows)
    assert found["norm"] > 0 and trainer.skipped == 0 and found["agreement_4"] == 0


@pytest.mark.parametrize("wrong", [dict(ttt_steps=0), dict(ttt_decay=0.0), dict(ttt_decay=1.5)])
def test_what_describes_no_unroll_is_refused(wrong):
    with pytest.raises(PatchError, match="describes no training"):
        Recipe(**wrong)


@pytest.mark.full
def test_later_drafts_are_accepted_more_often_than_after_training_the_first_alone():
    """On prompts that training did not see; drafted one by one from the drafter's own tokens."""
    target = make_target(markov=True)
    embeddings = embeddings_of(target)
    rows = pack(cut(capture(target, 24), auxiliary=True), 400)
    unseen = cut(capture(target, 6, seed=5), auxiliary=True)
    found = {}
    for steps in (1, 3):
        drafter = make_drafter(drafter_config(target.config, "eagle3"))
        trainer = Trainer(drafter, embeddings, Recipe(rate=5e-3, tokens=0.5, ttt_steps=steps))
        for _ in range(60):
            trainer.step(rows)
        found[steps] = accepted(drafter, embeddings, unseen, 3)
    assert found[1][0] > 0.6 and found[1][1] < 0.2, found
    assert found[3][0] > 0.6 and found[3][1] > 0.35 and found[3][2] > 0.2, found
