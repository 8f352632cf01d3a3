"""The end of a session counts once, when the session is over, and names what came only if it came whole."""

import types

import pytest
import torch

from flashpatch.patches.eagle.drafter_refit.acceptance import Acceptance
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights
from flashpatch.patches.eagle.sglang import drafter_refit


class Refit(drafter_refit.DrafterRefit):
    """Without a worker of SGLang's."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        DrafterVersions.__init__(self, "own", Acceptance(3), lambda: None)
        self.incoming, self._before_session = None, {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


@pytest.fixture
def refit(monkeypatch) -> Refit:
    refit = Refit(torch.zeros(3))
    monkeypatch.setattr(drafter_refit, "refit_of", lambda manager: refit)
    refit.session_started()
    return refit


def manager() -> types.SimpleNamespace:
    return types.SimpleNamespace(_session=types.SimpleNamespace(selector="draft"))


def end(at: types.SimpleNamespace, success: bool, is_open: bool = False) -> None:
    def original(self, request):
        self._session = self._session if is_open else None
        return types.SimpleNamespace(success=success, message="")

    drafter_refit.end_weight_update(original, at, None)


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_an_end_that_is_asked_for_again(refit: Refit, atomic: str) -> None:
    at = manager()
    if atomic == "layer":  # in place with the buckets
        refit.weight += 1
    end(at, success=False, is_open=True)
    assert refit.current.version == 0
    refit.weight.fill_(1)
    end(at, success=True)
    assert [entry["version"] for entry in refit.log] == [1]


def test_a_policy_that_may_be_in_place_has_a_version_of_its_own(monkeypatch) -> None:
    """An update from a disk that fails at the drafter has the target's weights in place: rows of two policies had one version."""
    monkeypatch.setattr(drafter_refit, "refit_of", lambda manager: None)
    monkeypatch.setattr(drafter_refit, "_policy_version", 4)
    failed = types.SimpleNamespace(success=False, message="the drafter has another shape")
    drafter_refit.update_weights_from_disk(lambda self, request: failed, types.SimpleNamespace(), None)
    assert drafter_refit._policy_version == 5


@pytest.mark.parametrize("changed", [False, True])
def test_a_named_session_that_fails(refit: Refit, changed: bool) -> None:
    refit.incoming = Weights(7, "/new")
    refit.weight += changed
    end(manager(), success=False)
    assert refit.current == Weights(int(changed), "" if changed else "own") and refit.incoming is None
