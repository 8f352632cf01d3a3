import random

import pytest
import torch
from drafter_lab import capture, cut, embeddings_of, make_target, random_samples

from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.loss import step_sums
from flashpatch.patches.eagle.train.pack import join, pack, windows


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_packed_loss_and_gradients_are_the_sum_of_separate_sequences(family, kind):
    torch.manual_seed(0)
    target = make_target(family).double()
    drafter = make_drafter(drafter_config(target.config, kind), dtype=torch.float64)
    target_embeddings = embeddings_of(target)
    samples = random_samples((9, 2, 17, 30, 5), 1)
    parts = [part.to("cpu", torch.float64) for part in cut(samples, 12, auxiliary=kind == "eagle3")]
    assert len(parts) > 5

    def run(rows):
        drafter.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)
        count = 0
        for row in rows:
            found = step_sums(drafter, target_embeddings, row, 1)[0]
            (found.states + 0.1 * found.tokens).backward()
            total += torch.stack((found.states, found.tokens)).detach()
            count += int(row.learn.sum())
        return total, count, {name: p.grad.clone() for name, p in drafter.named_parameters()}

    alone, packed = run(parts), run([join(parts)])
    assert alone[1] == packed[1] == sum(int(part.learn.sum()) for part in parts)
    # transformers' RMS norm and rotary tables are in single precision whatever the input is.
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-7, atol=1e-9)
    for name, gradient in alone[2].items():
        torch.testing.assert_close(packed[2][name], gradient, rtol=1e-5, atol=1e-8, msg=name)
    assert all(gradient.abs().sum() > 0 for gradient in alone[2].values())


def test_positions_pair_each_state_with_the_next_token_and_the_next_state():
    target = make_target(markov=True)
    drafter = make_drafter(drafter_config(target.config))
    with torch.no_grad():
        for parameter in drafter.layers.parameters():
            parameter.zero_()
        size = target.config.hidden_size
        drafter.fc.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
    target_embeddings = embeddings_of(target)
    for longest in (512, 7, 1):
        row = join(cut(capture(target, 4), longest))
        found = step_sums(drafter, target_embeddings, row, 1)[0]
        assert found.states.item() < 1e-9
        assert found.agreed.item() == int(row.learn.sum())


@pytest.mark.parametrize("longest", [1, 3, 8, 100])
def test_windows_lose_and_repeat_no_target_and_share_none(longest):
    for sample in random_samples(range(1, 25), 2):
        wanted = {
            position
            for position in range(len(sample) - 1)
            if sample.known[position] and sample.known[position + 1] and sample.response[position + 1]
        }
        found = [int(p) for part in windows(sample, longest) for p in part.positions[part.learn]]
        assert sorted(found) == sorted(wanted)
        for part in windows(sample, longest):
            assert len(part) <= longest
            torch.testing.assert_close(part.targets, sample.hidden[part.positions + 1])
            assert torch.equal(part.next_ids, sample.input_ids[part.positions + 1])


def test_a_row_sees_its_own_known_past_only():
    parts = cut(random_samples([12] * 3, 3), 5)
    row = join(parts)
    mask, start = row.mask()[0, 0], 0
    for part in parts:
        inside = slice(start, start + len(part))
        assert not mask[inside, :start].any() and not mask[inside, start + len(part) :].any()
        assert not mask[inside, inside].triu(1).any()
        off = mask[inside, inside] & ~torch.eye(len(part), dtype=torch.bool)
        assert not off[:, ~part.seen].any()
        start += len(part)
    assert mask.diagonal().all()


def test_rows_keep_to_their_budget_and_hold_every_part():
    source = random.Random(4)
    parts = cut(random_samples([source.randrange(8, 60) for _ in range(30)], 4), 20)
    rows = pack(parts, 50)
    assert all(len(row) <= 50 for row in rows)
    assert sum(int(row.learn.sum()) for row in rows) == sum(int(part.learn.sum()) for part in parts)
    assert len(rows) <= 1.2 * sum(map(len, parts)) / 50 + 1
    assert [len(row) for row in pack(parts[:1], 2)] == [len(parts[0])]
