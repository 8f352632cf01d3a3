"""SGLang loads a checkpoint a second time where the first attempt failed: the second answer has the first one's reason."""

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.sglang import model as loading
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
