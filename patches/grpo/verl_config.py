"""The recipe before anything starts: the loss mode is set where nobody chose one, and contradictions are
refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss.policy_loss import MODE
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.grpo")

ID = "grpo.verl.validate_config"
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
_DEFAULT = "vanilla"  # verl's; a recipe that says so cannot be told from one that says nothing


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``verl.utils.config.validate_config``, the first thing a trainer's driver does with its recipe.

    Raises:
        PatchError: settings that contradict the family; all are named.
    """
    from omegaconf import OmegaConf, open_dict

    engine.require("grpo")
    ledger.role("driver")
    options = engine.options("grpo")

    def get(path: str, default: Any = None) -> Any:
        return OmegaConf.select(config, path, default=default)

    refused = list(refusals(get, options))
    if refused:
        raise PatchError(
            f"contradicts this recipe: {'; '.join(refused)}.",
            patch=ID,
            advice="Change these settings, or switch that part off (grpo's options loss and router).",
        )
    with open_dict(config):
        for path, value, why in adaptations(get, options):
            logger.warning("%s=%s: %s", path, value, why)
            OmegaConf.update(config, path, value, force_add=True)
    for sentence in remarks(get, options):
        logger.warning("%s", sentence)
    return original(config, *args, **kwargs)


def refusals(get: Any, options: Any) -> Iterator[str]:
    """Settings that contradict the family, each with the reason; ``get(path, default)`` reads the recipe."""
    if not options["loss"]:
        return
    mode = get(LOSS, _DEFAULT)
    if mode not in (None, _DEFAULT, MODE):
        yield f"{LOSS}={mode} (grpo sets {MODE}; a recipe chooses one of the two)"
    if get("algorithm.rollout_correction.bypass_mode"):
        yield "algorithm.rollout_correction.bypass_mode=True (it brings a loss of its own)"


def adaptations(get: Any, options: Any) -> Iterator[tuple[str, Any, str]]:
    """Settings to make, with the reason."""
    if not options["loss"]:
        return
    if get(LOSS) != MODE:
        yield LOSS, MODE, "the loss divides by the samples that are really there"
    norm = get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"
    if norm and get(f"{ACTOR}.loss_scale_factor") is None:
        width = get("data.max_response_length")
        yield f"{ACTOR}.loss_scale_factor", width, "the width of a micro-batch depends on the split"


def remarks(get: Any, options: Any) -> Iterator[str]:
    """What stands aside in this recipe, and for what."""
    mode = get("trainer.v1.trainer_mode", "sync") if get("trainer.use_v1", True) else "legacy"
    yield (
        f"the streaming batcher stands aside: in trainer mode {mode} verl has the whole batch before it "
        "divides it, and balances it by Karmarkar and Karp"
    )
    if options["router"] and get("actor_rollout_ref.rollout.router_config_path"):
        yield "the token router stands aside: the recipe has a router_config_path"


PATCH = Patch(
    id=ID,
    targets=("verl.utils.config:validate_config",),
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(
        params=("config",),
        exists=(
            "verl.workers.config.actor:PolicyLossConfig.loss_mode",
            "verl.workers.config.actor:ActorConfig.loss_scale_factor",
        ),
    ),
    evidence="install",
    scope=frozenset({"driver"}),
    needs=("grpo.verl.register_policy_loss",),
    tested=("0.9.1",),
    why="A registered loss does nothing until a recipe names it.",
    how="Before anything starts, names the loss mode where the recipe has verl's default, gives a constant "
    "divisor where verl would take a micro-batch's width, and refuses another loss mode.",
    remove_when="never: it says what the family does to a recipe.",
)
