"""Draft tokens of vLLM 0.24's runner for CPUs, when a step drafts fewer than it may; ``vllm/test_engine.py`` has engines."""

from types import SimpleNamespace

import pytest
import torch
from installed import version_of
from packaging.version import Version

from flashpatch.patches.eagle import vllm_0_24

pytestmark = pytest.mark.vllm


@pytest.fixture
def runner_class():
    if version_of("vllm") >= Version("0.25"):
        pytest.skip("vLLM 0.25 and newer have one function for all devices")
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


def runner(drafts: torch.Tensor) -> SimpleNamespace:
    """What the two functions read of a runner with room for three drafts of four requests."""
    return SimpleNamespace(
        use_async_scheduling=False,
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        draft_token_ids_cpu=torch.full((4, 3), -1),
        prev_num_spec_tokens=3,
        _draft_token_ids=drafts,
        _draft_token_req_ids=None,
    )


@pytest.mark.parametrize("drafts", [[[5, 6], [7, 8]], [[5], [7]], [[5, 6, 9], [7, 8, 9]], [[], []]])
def test_what_was_drafted_is_handed_out(runner_class, drafts):
    held = runner(torch.tensor(drafts, dtype=torch.int64))
    vllm_0_24.copy_draft_token_ids_to_cpu(runner_class._copy_draft_token_ids_to_cpu, held, None)
    assert vllm_0_24.get_draft_token_ids_cpu(runner_class._get_draft_token_ids_cpu, held) == (
        drafts,
        ["a", "b"],
    )
    assert held.draft_token_ids_cpu.shape == (4, 3) and held.prev_num_spec_tokens == len(drafts[0])
