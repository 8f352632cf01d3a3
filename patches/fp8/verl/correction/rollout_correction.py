"""Switch on truncated importance sampling and exact logprobs for 8-bit rollouts by default."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.patches.fp8.precision import flashrl_compat
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fp8")

ID = "fp8.verl.validate_config_correction"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
MODE, ASKED = f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.calculate_log_probs"
CAP = 2.0
"""Largest importance weight of a token: verl's own default, and that of its TIS presets."""

_EXACT = {MODE: "processed_logprobs", ASKED: True}


def on_correct(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``validate_config``: set truncated importance sampling where no correction is chosen."""
    from omegaconf import OmegaConf, open_dict

    def get(path: str, default: Any = None) -> Any:
        return OmegaConf.select(config, path, default=default)

    ledger.role("driver")
    options = engine.options("fp8")
    rolled = precisions(options, get(f"{ROLLOUT}.quantization"))
    switched, why = decide(get, options["tis"], rolled, typed())
    if switched:
        with open_dict(config):
            for name, value in (("rollout_is", "token"), ("rollout_is_threshold", CAP)):
                OmegaConf.update(config, f"{CORRECTION}.{name}", value, force_add=True)
        logger.warning(
            "%s.rollout_is=token with cap %g: rollouts run in %s, and the config sets no correction. This "
            "changes the algorithm (truncated importance sampling); the option tis='off' leaves it as it is",
            CORRECTION,
            CAP,
            ", ".join(rolled),
        )
    ledger.note(tis={"on": switched, "why": why, "cap": CAP if switched else None, "rollouts": list(rolled)})
    return original(config, *args, **kwargs)


def on_logprobs(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the same function: make rollouts return the logprobs that their tokens were sampled with."""
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        for path, value in _EXACT.items():
            if path in typed():
                continue
            if OmegaConf.select(config, path) != value:
                logger.warning("%s=%s, since importance ratios need exact logprobs", path, value)
                OmegaConf.update(config, path, value, force_add=True)
    return original(config, *args, **kwargs)


def precisions(options: Mapping[str, Any], verl_quantization: str | None) -> tuple[str, ...]:
    """Return the precisions of the rollouts, without repetition.

    Args:
        options: the family's.
        verl_quantization: verl's own ``rollout.quantization``.
    """
    entries = flashrl_compat.entries(options["precision"], options["scheme"], options["fleet"])
    ours = [entry.precision for entry in entries]
    if verl_quantization:
        ours = [verl_quantization if name == "bf16" else name for name in ours]
    return tuple(dict.fromkeys(ours))


def decide(get: Any, tis: str, rolled: Collection[str], typed: Collection[str]) -> tuple[bool, str]:
    """Decide whether truncated importance sampling is switched on; return that and the reason.

    Args:
        get: ``get(path, default)`` reads the config.
        tis: the family's option.
        rolled: precisions of the rollouts.
        typed: settings given on the command line.
    """
    if tis == "off":
        return False, "the option tis is off"
    if all(precision == "bf16" for precision in rolled):
        return False, "rollouts run in bf16"
    chosen = sorted(name for name in typed if name.startswith(CORRECTION))
    chosen += [
        f"{CORRECTION}.{name}"
        for name in ("rollout_is", "rollout_rs", "bypass_mode")
        if get(f"{CORRECTION}.{name}")
    ]
    if chosen:
        return False, f"the config sets {chosen[0]}"
    for path, value in _EXACT.items():
        if get(path, value) != value:
            logger.warning("%s=%s, so there are no exact logprobs for a correction", path, get(path))
            return False, f"the config sets {path}={get(path)}"
    return True, "rollouts are quantized, and the config sets no correction"


def typed() -> set[str]:
    """Return settings given on the command line, if this process is a Hydra application."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return set()
    return {override.partition("=")[0].lstrip("+~") for override in module.HydraConfig.get().overrides.task}


def _natively(site: Any) -> str | None:
    """Return a description of verl's own defaults if they request exact logprobs, else None."""
    import verl
    import yaml

    path = Path(verl.__file__).parent / "trainer" / "config" / "rollout" / "rollout.yaml"
    try:
        written = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return None
    wanted = {name.rpartition(".")[2]: value for name, value in _EXACT.items()}
    if not isinstance(written, dict) or any(written.get(name) != value for name, value in wanted.items()):
        return None
    return "verl's rollout.yaml: " + ", ".join(f"{name}={value}" for name, value in wanted.items())


_patch = partial(
    Patch,
    targets=("verl.utils.config:validate_config",),
    requires="verl>=0.9",
    scope=frozenset({"driver"}),
)

PATCH = _patch(
    id=ID,
    wrapper=on_correct,
    contract=Contract(
        params=("config",),
        exists=(
            "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is",
            "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is_threshold",
            "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch",
        ),
    ),
    evidence="fault",  # only one of a job's drivers has it
    why="Tokens sampled from a quantized policy are trained on as if sampled from the trainer's; verl's "
    "correction for that is off by default.",
    how="Sets rollout_correction.rollout_is=token with cap 2 where rollouts are quantized and the config sets "
    "no correction, logs it, and writes it into the ledger.",
    remove_when="verl switches it on by itself for quantized rollouts.",
)

LOGPROBS = _patch(
    id="fp8.verl.validate_config_logprobs",
    wrapper=on_logprobs,
    contract=Contract(
        params=("config",), exists=("verl.workers.config.rollout:RolloutConfig.logprobs_mode",)
    ),
    evidence="fault",
    native=_natively,
    why="Logprobs before temperature, top-k and top-p are not those that tokens were sampled with.",
    how="Asks for processed logprobs where verl's defaults do not.",
    remove_when="no supported verl has other defaults.",
)
