"""Without the family verl is stock: the head would be exported."""

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl


def scenario(folder, code: str, **extra: str) -> str:
    """Run Python code; it must succeed, and its output is returned."""
    meet = f"file://{folder}/meet"
    done = cpu_lab.checked(code, folder, imported=warm.VERL_VLLM, DIST_INIT_METHOD=meet, **extra)
    return done.stdout + done.stderr


ACTOR_WITH = """
    import flashpatch, sys
    from pathlib import Path
    from flashpatch.patches.flowrl import actor; from flashpatch.verify.probes.flowrl import tiny
    where = tiny.write_model(Path("model"))
"""


def test_the_driver_sets_what_is_unset_and_the_filter_is_what_keeps_the_head_here(tmp_path):
    said = scenario(
        tmp_path,
        ACTOR_WITH
        + """
    import copy, logging
    logging.basicConfig(level="WARNING")
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config
    from flashpatch.errors import PatchError
    config = tiny.recipe(where)
    learns = config.actor_rollout_ref.actor
    assert (learns.policy_loss.loss_mode, learns.use_kl_loss, learns.kl_loss_coef) == ("flowrl", True, 0)
    validate_config(config, True, False)  # a second time, as the old trainer does
    def other(path, value):
        changed = copy.deepcopy(config)
        OmegaConf.update(changed, path, value, force_add=True)
        return changed
    def refused(named, call, *arguments):
        try:
            call(*arguments)
        except PatchError as error:
            assert named in str(error), error
        else:
            raise AssertionError(named)
    coefficient = "actor_rollout_ref.actor.kl_loss_coef"
    refused(f"{coefficient}=0.01", validate_config, other(coefficient, 0.01), False, False)
    # a worker whose driver checked nothing
    refused("loss_mode=gspo", tiny.worker, other("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"))
    refused("'beta' in enable() is -1.0, not above 0", lambda: flashpatch.enable("flowrl", beta=-1.0))
    engine = tiny.worker(config).actor.engine
    names = lambda: {name for name, _ in engine.get_per_tensor_param()[0]}
    ours = names()
    flashpatch.disable("flowrl")
    stock = names()
    head = {name for name in tiny.weights(engine) if "proj_z" in name}
    assert stock - ours == head and len(head) == 10
    assert {name for name, *_ in engine.get_per_tensor_param_shard()[0]} == stock
    flashpatch.enable("flowrl")
    assert names() == ours == {name for name, *_ in engine.get_per_tensor_param_shard()[0]}
    """,
        FLASHPATCH="cpu,bf16,flowrl",
    )
    for setting in ("policy_loss.loss_mode=flowrl", "use_kl_loss=True", "kl_loss_coef=0"):
        assert f"actor_rollout_ref.actor.{setting}: FlowRL needs it" in said
