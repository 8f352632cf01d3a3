"""Every function of vLLM by which weights can be written is in the table; a new one fails here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tree import TREE

from flashpatch.verify import doors
from flashpatch.verify.door_table import VLLM, VLLM_HARMLESS


@pytest.mark.vllm
def test_the_installed_vllm_has_no_door_that_is_not_in_the_table() -> None:
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    found = doors.of_vllm(root)
    assert {"rpc reload_weights", "backend nccl", "v1.worker.gpu_worker:Worker.wake_up"} <= found
    assert not doors.unnamed(found), "decide what becomes of it, in verify/door_table.py"


def test_the_page_is_the_table() -> None:
    written = (TREE / "docs" / "reference" / "doors.md").read_text()
    assert written == doors.page(), "python -m flashpatch.verify.doors writes it"


def test_no_door_is_named_twice() -> None:
    names = [name for door in VLLM for name in door.doors]
    assert len(names) == len(set(names))
    assert not {name.removeprefix("rpc ") for name in names} & VLLM_HARMLESS
    assert {door.fate for door in VLLM} == {"followed", "refused", "cannot", "unseen"}


def test_what_a_version_grows_is_found(tmp_path: Path) -> None:
    sources = {
        "v1/worker/worker_base.py": "class WorkerBase:\n    def check_health(self): ...\n    def graft(self, tree): ...\n",
        "v1/worker/gpu_worker.py": "class Worker:\n    def _own(self, param):\n        param.data.copy_(1)\n",
        "v1/worker/cpu_worker.py": "def helper(): ...\n",
        "distributed/weight_transfer/factory.py": 'WeightTransferEngineFactory.register_engine(\n    "tape", "m", "T"\n)\n',
        "distributed/weight_transfer/tape.py": "class T:\n    def receive(self):\n        self.model.load_weights([])\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doors.unnamed(doors.of_vllm(tmp_path)) == {
        "rpc graft",
        "backend tape",
        "v1.worker.gpu_worker:Worker._own",
        "distributed.weight_transfer.tape:T.receive",
    }
