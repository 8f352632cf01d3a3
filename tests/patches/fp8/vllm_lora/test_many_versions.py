"""A hundred versions of an adapter in two places, each sent while a request runs under the one before; a rank that dies."""

import os
import signal
from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, scenario
from vllm_precisions import opened

pytestmark = [pytest.mark.vllm, pytest.mark.full]

VERSIONS, CONTENTS = 100, 5
STEPS_BEFORE_THE_NEXT = 5  # of 8, so that the one before has ended, and the runner has heard of it


# --- what runs in the engine's process


def trained_on(a: str, folders: list[str]) -> dict[str, Any]:
    """Tokens of a request per version. A version takes the place of the last but one; the last one's request runs."""
    from flashpatch import ledger

    ends: dict[str, Any] = {}
    running = []
    cached = dict(enable_prefix_caching=True, block_size=32)
    with opened("bf16", a, **{**lora_lab.ENGINE, "max_loras": 2}, **cached) as llm:
        for version in range(VERSIONS):
            place = dict(name=f"policy {version % 2}", number=1 + version % 2)
            lora_lab.send(llm, folders[version % CONTENTS], **place)
            running.append(llm.llm_engine.get_num_unfinished_requests())
            engines.add(llm, str(version), lora=lora_lab.request(folders[version % CONTENTS], **place))
            ends |= engines.step(llm, STEPS_BEFORE_THE_NEXT)
            while str(version - 1) not in ends and version:
                ends |= engines.step(llm)
        ends |= engines.ended(llm)
        tokens = {name: engines.tokens_of(output) for name, output in ends.items()}
        return dict(tokens=tokens, running=running, version=ledger.notes()["adapter_version"])


def kill_rank(worker: Any) -> None:
    """Let rank 1 be killed while it loads the next adapter."""
    if worker.rank == 1:
        worker.model_runner.lora_manager._load_adapter = lambda request: os.kill(os.getpid(), signal.SIGKILL)


def killed(a: str, folders: list[str]) -> dict[str, Any]:
    with engines.open_llm(a, **lora_lab.ENGINE, tensor_parallel_size=2, fork=True) as llm:
        lora_lab.send(llm, folders[0])
        llm.collective_rpc(kill_rank)
        return dict(
            sent=updates.error(lambda: lora_lab.send(llm, folders[1])),
            asked=updates.error(lambda: lora_lab.ask(llm, folders[0])),
        )


# --- the tests


def test_each_request_is_answered_by_its_own_version(runner: scenario.Runner) -> None:
    a = updates.checkpoint("qwen2", 0)
    folders = [lora_lab.adapter(a, seed) for seed in range(1, CONTENTS + 1)]
    got = runner(trained_on, a, folders)
    want = [lora_lab.fresh(a, folder)["tokens"][0] for folder in folders]
    assert len({tuple(tokens) for tokens in want}) == CONTENTS  # else a wrong version would not be seen
    assert got["version"] == VERSIONS and got["running"] == [0] + [1] * (VERSIONS - 1)
    wrong = [v for v in range(VERSIONS) if got["tokens"][str(v)] != want[v % CONTENTS]]
    assert not wrong


def test_an_engine_with_a_rank_killed_while_it_loads_answers_nobody() -> None:
    if version_of("vllm") < Version("0.27"):
        pytest.skip("vLLM 0.24 itself fails under an adapter on two ranks of a CPU")
    a = updates.checkpoint("qwen2", 0)
    folders = [lora_lab.adapter(a, seed) for seed in (1, 2)]
    got = scenario.run(killed, a, folders, env={"FLASHPATCH": "bf16"}, timeout=500)
    assert got["sent"] is not None and got["asked"] is not None, got
