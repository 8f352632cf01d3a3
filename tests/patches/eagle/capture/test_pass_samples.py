"""What is taken of a model's own pass, and what is not; `eagle/verl/test_old_log_probs.py` holds states against transformers."""

import pytest
import torch
from drafter_lab import make_target
from machine import limit

from flashpatch.patches.eagle.capture.pass_samples import PassSamples
from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter


@pytest.fixture
def begin(tmp_path):
    """Return samples of a model to a queue, with a budget and a window, and a function that reads them."""

    def make(budget=0, window=512):
        model = make_target()
        made = PassSamples(model, "eagle", SampleWriter(tmp_path / "queue"), budget, window)

        def run(*parts):
            with torch.no_grad(), made.noting():
                model(torch.cat([ids for ids, _ in parts])[None], use_cache=False)
                made.take(*map(list, zip(*parts, strict=True)))

        def read():
            made.writer.close(limit(60))
            return SampleReader(tmp_path / "queue").read_samples(99)

        return made, run, read

    return make


def answer(length, prompt):
    return torch.arange(length) % 64, torch.arange(length) >= prompt


def test_versions_follow_training_and_the_budget_holds_for_each(begin):
    samples, run, read = begin(budget=12)
    for trains in (False, True, False, True):
        samples.trained |= trains
        run(answer(5, 2), answer(9, 4), answer(3, 1))
    assert [(one.version, len(one)) for one in read()] == [(n, size) for n in range(3) for size in (5, 9)]


def test_a_window_of_a_long_answer_has_tokens_to_learn_from(begin):
    """One of a tool's tokens, or the first of a window alone, teaches nothing."""
    samples, run, read = begin(window=4)
    ids, learn = answer(41, 21)
    learn[25:32] = False
    for _ in range(30):
        run((ids, learn), answer(40, 40))  # and one of which nothing was generated
    found = read()
    starts = {int(one.input_ids[0]) for one in found}
    assert len(found) == 30 and starts <= {20, 32, 36} and len(starts) > 1
    assert all(one.response[1:].any() and len(one) == 4 for one in found)
