"""Which policy captured rows are of, and what is left of a recorder whose engine has ended."""

import threading
from pathlib import Path
from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from vllm_lab import engines, scenario

pytestmark = pytest.mark.vllm


def tell(worker: Any, what: str) -> None:
    from flashpatch.patches.fp8 import model_registry

    getattr(model_registry.get(worker.get_model()), what)()


def followed(a: str, b: str, folders: list[str]) -> dict[str, Any]:
    from flashpatch.patches.eagle.vllm import capture

    versions = []
    with engines.open_llm(a, **lora_lab.ENGINE) as llm:

        def ask(folder: str = "") -> None:
            lora_lab.ask(llm, folder) if folder else engines.answers(llm)
            versions.append([one.version for one in capture._captures.values()])

        ask()
        llm.collective_rpc(tell, args=("begin",))
        engines.inner_model(llm).load_weights(iter(lora_lab.base(b)))
        ask()  # the old policy still, whose successor is complete but for its end
        llm.collective_rpc(tell, args=("finish",))
        ask()
        for folder in folders:
            lora_lab.send(llm, folder)
            ask(folder)
    ours = ("flashpatch-recorder", "flashpatch-samples")
    return dict(versions=versions, left=[one.name for one in threading.enumerate() if one.name in ours])


def test_a_policy_begins_with_a_commit_or_another_adapter(tmp_path: Path) -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    folders = [lora_lab.adapter(a, seed) for seed in (1, 2)]
    config = tmp_path / "flashpatch.toml"
    config.write_text(f'[fp8]\natomic = "model"\n[eagle]\nadapt = false\nsamples = "{tmp_path}/samples"\n')
    env = {"FLASHPATCH": "bf16,eagle", "FLASHPATCH_CONFIG": str(config)}
    found = scenario.run(followed, a, b, folders, env=env, timeout=300)
    assert found == dict(versions=[[0], [0], [1], [1], [2]], left=[])
