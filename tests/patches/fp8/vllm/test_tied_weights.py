"""Which of vLLM's loaders check for tied tensors, by source."""

from types import SimpleNamespace

import pytest

from flashpatch.contracts.contract import check
from flashpatch.contracts.source import Sources
from flashpatch.patches.fp8.vllm import model_loader

LOADS = "class AutoWeightsLoader:\n    def load_weights(self, weights): ...\n"
CHECKS = LOADS + "    def _check_skipped_aliases(self, autoloaded_weights): ...\n"


@pytest.mark.parametrize(
    "source, method, by",
    [(CHECKS, "_check_skipped_aliases", None), (LOADS, "load_weights", "a loader without that check")],
)
def test_a_loader_without_the_check_needs_no_patch(tmp_path, source, method, by):
    module = tmp_path / "vllm" / "model_executor" / "models" / "utils.py"
    module.parent.mkdir(parents=True)
    module.write_text(source)
    for package in (module.parent, module.parents[1], module.parents[2]):
        (package / "__init__.py").touch()
    patch = model_loader.patches.of(model_loader.check_skipped_aliases)
    found = check(patch, Sources({"vllm": tmp_path / "vllm"}.get))
    assert found.ok and found.target.endswith(f":AutoWeightsLoader.{method}")
    assert patch.native(SimpleNamespace(target=found.target)) == by
