"""A head that comes for a model whose head is tied at its construction: its loader passes over it."""

import fp8_toys as toys
import pytest
import torch

from flashpatch.errors import PatchError

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
ORDERS = {
    "one call": [[EMBEDDING, HEAD]],
    "one call, the head first": [[HEAD, EMBEDDING]],
    "calls": [[EMBEDDING], [HEAD]],
    "calls, the head first": [[HEAD], [EMBEDDING]],
}


def sent(seed: int, order: str, differs: bool, dtype=torch.float32) -> list[list[tuple[str, torch.Tensor]]]:
    """A policy in calls: embedding and head as ``order`` says, then everything else."""
    weights = dict(toys.checkpoint(seed, tied=True))
    weights[HEAD] = weights[EMBEDDING].flip(0) if differs else weights[EMBEDDING].clone()
    weights[HEAD] = weights[HEAD].to(dtype)
    first = [[(name, weights[name]) for name in names] for names in ORDERS[order]]
    return [*first, [item for item in weights.items() if item[0] not in (EMBEDDING, HEAD)]]


def engine(seed, **keywords):
    return toys.engine(seed=seed, tied=True, **keywords)


@pytest.fixture(params=[False, True], ids=["", "drawn first"])
def draws(request, monkeypatch):
    """Whether the loader draws everything first: which of the tensors it wrote is not seen."""
    original = toys.Model.load_weights
    if request.param:
        monkeypatch.setattr(toys.Model, "load_weights", lambda self, weights: original(self, list(weights)))


@pytest.mark.parametrize("opened", [0, None], ids=["loaded", "dummy"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_equal_head_changes_nothing(atomic, order, opened, draws):
    tied = engine(opened, atomic=atomic)
    for seed in (1, 2):
        for bucket in sent(seed, order, differs=False, dtype=torch.float64):
            tied.load(bucket)
        tied.managed.finish()
        assert tied.managed.version == seed
        weights = toys.checkpoint(seed, tied=True)
        assert toys.same_answers(tied.model, toys.fresh("transposed", weights, tied=True))


@pytest.mark.parametrize("opened", [0, None], ids=["loaded", "dummy"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_head_of_its_own_is_refused(atomic, order, opened, draws):
    tied = engine(opened, atomic=atomic)
    with pytest.raises(
        PatchError, match="have different values, and this engine was opened with the two tied"
    ):
        for bucket in sent(1, order, differs=True):
            tied.load(bucket)
    assert tied.managed.may_generate == (atomic == "model")
    assert tied.takes(toys.checkpoint(2, tied=True))


def test_a_head_whose_embedding_is_not_known_by_name(atomic, draws, monkeypatch):
    original = toys.Model.load_weights

    def renamed(self, weights):
        return original(self, [(name.replace("tokens.", "embed."), tensor) for name, tensor in weights])

    monkeypatch.setattr(toys.Model, "load_weights", renamed)
    tied = engine(0, atomic=atomic)
    whole = [item for bucket in sent(1, "calls", differs=False) for item in bucket]
    whole = [(name.replace("embed.", "tokens."), tensor) for name, tensor in whole]
    with pytest.raises(PatchError, match="could not be compared"):
        tied.update(whole)
    weights = [item for item in whole if item[0] != "lm_head.weight"]
    tied.update(weights)
    expected = toys.fresh("transposed", toys.checkpoint(1, tied=True), tied=True)
    assert toys.same_answers(tied.model, expected)
