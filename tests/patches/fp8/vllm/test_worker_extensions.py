"""Worker extensions of OpenRLHF, ms-swift, checkpoint-engine and prime-rl, as installed, on real engines.

With FlashPatch the engine is one opened on what the trainer sent. NCCL and CUDA have stand-ins (`nccl_standin`)."""

from typing import Any

import pytest
import trainer_senders as senders
import vllm_updates as updates
from vllm_lab import engines, oracle, scenario

pytestmark = pytest.mark.full

DOORS = [
    pytest.param(door, marks=pytest.mark.trainer(door.partition(",")[0]), id=door.replace(", ", "-"))
    for door in senders.SENDERS
]
SWIFT = pytest.mark.trainer("swift")
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"


def driven(door: str, precision: str, leave_out: str = "", family: str = "qwen2", **kw: Any):
    """What `trainer_senders.drive` finds on a model A that is sent B; ``precision`` "" is stock."""
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    env = {**senders.PLUGINS, **({"FLASHPATCH": precision} if precision else {})}
    return scenario.run(senders.drive, door, a, b, leave_out, env=env, standin=True, **kw)


def fresh(precision: str, family: str = "qwen2") -> dict[str, Any]:
    """What an engine answers that was opened on B."""
    if precision == "int8":
        return oracle.answers(updates.checkpoint(family, 1, "int8"))
    return oracle.answers(updates.checkpoint(family, 1))


@pytest.mark.parametrize("door", DOORS)
def test_the_engine_is_one_opened_on_what_was_sent(door: str) -> None:
    """Rounded where it comes in, without a sign of the last tensor or with post-processing as one."""
    found = driven(door, "int8")
    assert (found["error"], found["refusal"]) == (None, None)
    assert engines.difference(found["answers"], fresh("int8")).exact


@pytest.mark.parametrize("door", DOORS)
def test_a_weight_that_does_not_come_is_named(door: str) -> None:
    """By the sync; a complete one mends it."""
    found = driven(door, "bf16", LEFT_OUT)
    assert LEFT_OUT.removesuffix(".weight") in (found["error"] or "") and found["answers"] is None
    assert found["error again"] is None
    assert engines.difference(found["mended"], fresh("bf16")).exact


@SWIFT
@pytest.mark.parametrize("door", [door for door in senders.SENDERS if door.startswith("swift")])
def test_swift_hears_of_it_where_the_old_policy_stays(door: str) -> None:
    """With atomic="model" the old policy serves on, so that nothing but the sync itself can say so."""
    found = scenario.run(
        old_policy_stays, door, *(updates.checkpoint("qwen2", seed) for seed in (0, 1)), env=senders.PLUGINS
    )
    assert LEFT_OUT.removesuffix(".weight") in (found["error"] or "")
    assert engines.difference(found["answers"], oracle.answers(updates.checkpoint("qwen2", 0))).exact
    assert engines.difference(found["mended"], fresh("bf16")).exact


@pytest.mark.trainer("prime_rl")
def test_a_layerwise_reload_does_not_forget_tied_embeddings() -> None:
    found = driven("prime_rl", "bf16", family="qwen2-tied")
    assert found["error"] is None
    assert engines.difference(found["answers"], fresh("bf16", "qwen2-tied")).exact


@pytest.mark.trainer("prime_rl")
def test_the_format_of_kernels_is_refused() -> None:
    a = updates.checkpoint("qwen2", 0)
    found = scenario.run(senders.kernel_format, a, env={**senders.PLUGINS, "FLASHPATCH": "bf16"})
    assert "fp8.prime_rl.load_weights_kernel" in found["error"]
    assert engines.difference(found["answers"], oracle.answers(a)).exact


def old_policy_stays(door: str, a: str, b: str) -> dict[str, Any]:
    import flashpatch

    flashpatch.enable("bf16", atomic="model")
    return senders.drive(door, a, b, LEFT_OUT)
