"""SGLang loads a checkpoint a second time where the first attempt failed: the second answer has the first one's reason."""

import fp8_toys as toys
import pytest
import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.sglang import model as loading
from flashpatch.patches.fp8.sglang import update_session, weight_updater
from flashpatch.patches.fp8.update.events import REQUESTS_RUN


class Model:
    """A model whose update cannot begin, as its scheduler's requests run, or begins and fails."""

    asleep = False

    def __init__(self, busy: bool, error: str = "") -> None:
        self.busy, self.error = busy, error

    def begin(self) -> None:
        if self.busy:
            raise PatchError(f"{REQUESTS_RUN}, so the update is refused")


@pytest.mark.parametrize("earlier", ["", "an update of before, which failed"])
def test_an_update_that_cannot_begin(earlier: str) -> None:
    model = Model(busy=True, error=earlier)
    with loading.one_attempt(model):
        for _ in range(2):
            with pytest.raises(PatchError, match=REQUESTS_RUN):
                loading.begin(model, "fp8.sglang.test")
    model.busy = False
    with loading.one_attempt(model):
        loading.begin(model, "fp8.sglang.test")


def test_an_update_that_fails_on_its_way() -> None:
    model = Model(busy=False)
    with loading.one_attempt(model):
        loading.begin(model, "fp8.sglang.test")
        model.error = "embed_tokens.weight did not come"
        with pytest.raises(PatchError, match="fp8.sglang.test.*embed_tokens.weight did not come"):
            loading.begin(model, "fp8.sglang.test")
    loading.begin(model, "fp8.sglang.test")


def test_a_session_whose_policy_failed_is_not_committed_by_its_drafter() -> None:
    """Its end was answered with success, and the old policy answered under the new version."""
    a, b = toys.checkpoint(0), toys.checkpoint(1)
    policy, drafter = toys.engine(atomic="model"), toys.engine(atomic="model", role="drafter")
    owners = [policy.managed, drafter.managed]

    def send(engine: toys.Engine, weights: list) -> bool:
        return weight_updater.load_bucket([], None, "x", lambda: (engine.load(weights), (True, ""))[1])[0]

    update_session.begin("", owners, lambda: ([one.begin() for one in owners], (True, ""))[1])
    assert send(policy, b[:-1]) and not send(policy, [(b[-1][0], b[-1][1] * torch.nan)]) and send(drafter, b)
    outcome = update_session.end(
        owners,
        lambda: ([loading.commit(one) for one in owners], (True, ""))[1],
        idle=True,
        flush=lambda: True,
        gather=str,
        rank=(0, 1, None),
    )
    assert not (outcome.done or outcome.committed) and "NaN" in outcome.message
    assert toys.same_answers(policy.model, toys.fresh("transposed", a))
