"""Updates are counted once they are over, and a drafter that came under a name has it only if it came whole."""

import sys
import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flashpatch.patches.eagle.drafter_refit.versions import Weights
from flashpatch.patches.eagle.sglang import drafter_refit
from flashpatch.patches.eagle.sglang.drafter_refit import DrafterRefit


class Worker(types.SimpleNamespace):
    """SGLang's, with a drafter that shares ``embed`` with its target."""

    __hash__ = object.__hash__


@pytest.fixture
def worker(monkeypatch) -> Worker:
    published = types.SimpleNamespace(
        get_spec=lambda: types.SimpleNamespace(speculative_draft_model_path="own")
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", published)
    target, draft = torch.nn.Linear(2, 2), torch.nn.Module()
    draft.head, draft.embed = torch.nn.Parameter(torch.zeros(3)), target.weight
    return Worker(
        speculative_num_steps=3,
        _target_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=target)),
        _draft_worker=types.SimpleNamespace(draft_runner=types.SimpleNamespace(model=draft)),
    )


@pytest.fixture
def refit(worker: Worker, monkeypatch) -> DrafterRefit:
    refit = DrafterRefit(types.SimpleNamespace(draft_worker=worker))
    refit.weight = (
        worker._draft_worker.draft_runner.model.head.data
    )  # as SGLang's loaders write, which counts no version
    monkeypatch.setattr(drafter_refit, "refit_of", lambda manager: refit)
    return refit


def test_updates_are_counted_and_the_same_weights_are_none(refit: DrafterRefit) -> None:
    assert list(refit.weights()) == ["head"]

    def send(value: float) -> int:
        refit.weight.fill_(value)
        refit.compare()
        return refit.current.version

    refit.count([3, 3], 3)
    assert [send(value) for value in (0.0, 1.0, 1.0, 2.0)] == [0, 1, 1, 2]
    assert [entry["before"] for entry in refit.log] == [4, 0]
    refit.count([3, 3], 3)
    refit.count([0, 0], 0)  # a step that drafted nothing says nothing
    assert refit.acceptance.length == 4


def manager(**more: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(scheduler=types.SimpleNamespace(forward_ct=0), **more)


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_an_end_that_is_asked_for_again(refit: DrafterRefit, atomic: str) -> None:
    at = manager(_session=types.SimpleNamespace(selector="draft"))
    if atomic == "layer":  # in place with the buckets
        refit.weight += 1
    drafter_refit.end_weight_update(lambda self, request: None, at, None)
    assert refit.current.version == 0
    refit.weight.fill_(1)

    drafter_refit.end_weight_update(lambda self, request: setattr(self, "_session", None), at, None)
    assert [entry["version"] for entry in refit.log] == [1]


def test_requests_with_no_batch_between_them_are_one_update(refit: DrafterRefit, monkeypatch) -> None:
    """Before 0.5.21 a session is FlashPatch's own, or there is none. One that fails counts too: the target's weights may be
    in place, and rows of two policies had one version."""
    monkeypatch.setattr(drafter_refit, "_policy_version", 4)
    monkeypatch.setattr(drafter_refit, "_counted", 0)
    at, more = manager(), types.SimpleNamespace(disable_draft_model=True)
    for batches, version, drafters in ((0, 4, 0), (3, 5, 0), (3, 5, 0), (7, 6, 0), (7, 6, 1)):
        at.scheduler.forward_ct = batches
        if drafters:
            more.disable_draft_model, refit.weight[0] = False, 1
        drafter_refit.end_weight_update(lambda self, request: None, at, more)
        assert (drafter_refit._policy_version, refit.current.version) == (version, drafters)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_drafter_is_named_if_it_came_whole(
    refit: DrafterRefit, worker: Worker, sessions: bool, writes: bool, fails: bool
) -> None:
    def update(tensors: list[Any], load_format: None) -> tuple[bool, str]:
        calls.append("update")
        refit.weight.fill_(writes)
        return not fails, "no"

    calls: list[str] = []
    updater = types.SimpleNamespace(update_weights_from_tensor=update)
    if sessions:
        updater.begin_weight_update = lambda: calls.append("begin")
        updater.end_weight_update = lambda run_post_load: calls.append("end")
    worker._draft_worker.draft_runner.weight_updater = updater
    with pytest.raises(RuntimeError, match="no") if fails else nullcontext():
        refit.load({}, Weights(7, "/new"))
    assert calls == (["begin", "update", "end"] if sessions else ["update"])
    unnamed = Weights(1, "") if writes else Weights(0, "own")
    assert refit.current == (unnamed if fails else Weights(7, "/new"))
    refit.compare()
    assert len(refit.log) == (writes if fails else 1), "it was counted again"
