"""The transfer's patches on the installed verl: armed, and undone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from machine import limit

pytestmark = pytest.mark.verl


def scenario(code: str, folder: Path) -> None:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLASHPATCH", "VERL_", "RAY_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "FLASHPATCH_LEDGER": str(folder), "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_armed_and_undone(tmp_path):
    scenario(
        """
        import importlib, sys
        import flashpatch, flashpatch.engine as engine
        from flashpatch.patches.fp8 import FAMILY
        from flashpatch.arming.preflight import examine

        ours = [patch for patch in FAMILY.patches if patch.framework == "verl"]
        assert len(ours) == 21 and not {"torch", "zmq", "verl", "ray"} & set(sys.modules)
        for patch in ours:
            found = examine(patch)
            assert found.problem is None, (patch.id, found.problem)
            assert found.installed.version in patch.tested, patch.id

        flashpatch.enable("cpu")  # lets verl find a platform and vLLM's CPU build
        where = {}
        for patch in ours:
            module, _, name = patch.targets[0].partition(":")
            owner = importlib.import_module(module)
            *path, name = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            where[patch.id] = (owner, name)
        look = lambda: {id: vars(owner)[name] for id, (owner, name) in where.items()}

        before = look()
        flashpatch.enable("bf16")
        during = look()
        for patch in ours:
            native = patch.id == "fp8.verl.validate_config_logprobs"  # verl asks for exact logprobs by itself
            word = "superseded" if native else "installed"
            assert engine.statuses()[patch.id].state.word == word, (patch.id, engine.statuses()[patch.id])
            assert native or during[patch.id] is not before[patch.id], patch.id
        flashpatch.disable("bf16")
        assert all(one is before[id] for id, one in look().items())
        """,
        tmp_path,
    )
