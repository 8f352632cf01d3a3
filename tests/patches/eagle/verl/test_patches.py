"""The records on the installed verl: contracts hold, and undo restores the very objects."""

from __future__ import annotations

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl


def scenario(code: str, folder) -> None:
    done = cpu_lab.python(code, folder, imported=warm.VERL_VLLM)
    assert done.returncode == 0, cpu_lab.tail(done)


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
