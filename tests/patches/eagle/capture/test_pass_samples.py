"""States of a model's own pass: packed and padded rows, wrapped models, several versions, against a forward of each sequence."""

import pytest
import torch
from drafter_lab import FAMILIES, make_target
from machine import limit

from flashpatch.patches.eagle.capture.pass_samples import PassSamples
from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter

LENGTHS = (5, 9, 3)
PROMPTS = (2, 4, 1)


@pytest.fixture
def begin(tmp_path):
    """Return samples of a model to a queue, with what else is given, and a function that reads them."""

    def make(model, kind="eagle", budget=0, window=512):
        made = PassSamples(model, kind, SampleWriter(tmp_path / "queue"), budget, window)

        def read():
            made.writer.close(limit(60))
            return SampleReader(tmp_path / "queue").read_samples(99)

        return made, read

    return make


def sequences(seed=0):
    noise = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 64, (n,), generator=noise) for n in LENGTHS]
    return ids, [torch.arange(n) >= prompt for n, prompt in zip(LENGTHS, PROMPTS, strict=True)]


def run(samples, model, ids, trained, packed):
    with torch.no_grad(), samples.noting():
        if packed:
            positions = torch.cat([torch.arange(len(one)) for one in ids])[None]
            model(torch.cat(ids)[None], position_ids=positions, use_cache=False)
        else:
            rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            model(rows, attention_mask=(torch.arange(rows.shape[1]) < torch.tensor(LENGTHS)[:, None]).long())
        samples.take(ids, trained)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("packed", [True, False])
def test_states_are_those_of_a_forward_of_each_sequence(begin, family, kind, packed):
    model = make_target(family, num_hidden_layers=8, attn_implementation="eager" if not packed else "sdpa")
    samples, read = begin(model, kind)
    ids, trained = sequences()
    run(samples, model, ids, trained, packed)
    found = read()
    assert len(found) == len(ids)
    for one, tokens, learn in zip(found, ids, trained, strict=True):
        with torch.no_grad():
            wanted = model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
        assert torch.equal(one.input_ids, tokens) and torch.equal(one.response, learn) and one.known.all()
        torch.testing.assert_close(one.hidden, wanted[-1][0], rtol=1e-4, atol=1e-4)
        if kind == "eagle3":
            inner = torch.cat([wanted[number][0] for number in (2, 4, 5)], -1)
            torch.testing.assert_close(one.auxiliary, inner, rtol=1e-4, atol=1e-4)
        else:
            assert one.auxiliary is None


def test_versions_follow_training_and_the_budget_holds_for_each(begin):
    model = make_target()
    samples, read = begin(model, budget=12)
    ids, trained = sequences()
    for trains in (False, True, True):
        samples.trained |= trains
        run(samples, model, ids, trained, packed=True)
    assert [(one.version, len(one)) for one in read()] == [
        (n, size) for n in range(3) for size in LENGTHS[:2]
    ]


def test_a_window_of_a_long_answer_has_tokens_to_learn_from(begin):
    model = make_target()
    samples, read = begin(model, window=4)
    tokens = torch.arange(40) % 64
    nothing = torch.zeros(40, dtype=torch.bool)
    for number in range(30):
        with torch.no_grad(), samples.noting():
            model(torch.cat((tokens, tokens))[None], use_cache=False)
            samples.take([tokens, tokens], [torch.arange(40) >= 21, nothing])
    found = read()
    starts = {int(one.input_ids[0]) for one in found}
    assert len(found) == 30 and starts <= {20, 24, 28, 32, 36} and len(starts) > 2
    assert all(one.response.any() and len(one) == 4 for one in found)


def test_outside_of_a_pass_nothing_is_noted(begin):
    model = make_target()
    samples, read = begin(model)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    with pytest.raises(KeyError), samples.noting():
        samples.take([], [])
    assert samples._notes is None and read() == []
