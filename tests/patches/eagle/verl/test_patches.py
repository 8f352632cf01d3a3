"""The records on the installed verl: contracts hold, and undo restores the very objects."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from cpu_lab import environment, tail
from machine import limit

pytestmark = pytest.mark.verl


def scenario(code: str, folder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, tail(done)


def test_contracts_hold_and_undo_restores_the_very_objects(tmp_path):
    scenario(
        """
        import flashpatch
        from flashpatch.patches.eagle.verl import PATCHES
        from flashpatch.arming.preflight import examine

        for patch in PATCHES:
            found = examine(patch)
            assert found.problem is None, (patch.id, found.problem)

        flashpatch.enable("cpu", "bf16")
        import verl.utils.config as config
        from verl.checkpoint_engine.base import CheckpointEngineManager as manager
        from verl.utils.tracking import Tracking

        def look():
            return [config.validate_config, vars(manager)["update_weights"], vars(manager)["sleep_replicas"],
                    vars(Tracking)["log"]]

        before = look()
        flashpatch.enable("eagle")
        assert not any(now is then for now, then in zip(look(), before))
        flashpatch.disable("eagle")
        assert all(now is then for now, then in zip(look(), before))
        """,
        tmp_path,
    )
