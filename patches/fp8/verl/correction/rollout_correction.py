"""Switch on truncated importance sampling and exact logprobs for 8-bit rollouts by default."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.patches._shared.verl_config import JobConfig, validate_config_patch
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.verl import float32_head
from flashpatch.patches.fp8.verl.correction import truncated_sampling
from flashpatch.patches.fp8.verl.support import settings as support
from flashpatch.record import Contract

logger = logging.getLogger("flashpatch.fp8")

ID = "fp8.verl.validate_config_correction"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
MODE, ASKED = f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.calculate_log_probs"
CAP = 2.0
"""Largest importance weight of a token: verl's own default, and that of its TIS presets."""

_EXACT = {MODE: "processed_logprobs", ASKED: True}


def on_correct(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Switch truncated importance sampling on for quantized rollouts if the user chose no correction, and warn
    of ratios over different supports, or see to it that they are over the same.

    Raises:
        PatchError: with the option support, or lm_head, settings that stand against it.
    """
    job = JobConfig(config, ID)
    ledger.role("driver")
    options = engine.options("fp8")
    rolled = precisions(options, job.get(f"{ROLLOUT}.quantization"))
    switched, why = decide(job.get, options["tis"], rolled, job.overrides)
    if switched:
        job.set(
            f"{CORRECTION}.rollout_is",
            "token",
            f"truncated importance sampling with cap {CAP:g}, since rollouts run in {', '.join(rolled)} and no "
            "correction is set. This changes the algorithm; the option tis='off' leaves it as it is",
        )
        job.set(f"{CORRECTION}.rollout_is_threshold", CAP)
    support.prepare(job, options["support"])
    float32_head.check(job, options["lm_head"])
    truncated_sampling.report(job.get, options["support"])
    ledger.note(tis={"on": switched, "why": why, "cap": CAP if switched else None, "rollouts": list(rolled)})
    return original(config, *args, **kwargs)


def on_logprobs(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Make rollouts return the logprobs that their tokens were sampled with."""
    job = JobConfig(config, LOGPROBS.id)
    for path, value in _EXACT.items():
        if path not in job.overrides:
            job.set(path, value, "importance ratios need exact logprobs")
    return original(config, *args, **kwargs)


def precisions(options: Mapping[str, Any], verl_quantization: str | None) -> tuple[str, ...]:
    """Return the precisions of the rollouts, without repetition.

    Args:
        options: the family's.
        verl_quantization: verl's own ``rollout.quantization``.
    """
    entries = fleet.entries(options["precision"], options["scheme"], options["fleet"])
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


PATCH = validate_config_patch(
    id=ID,
    requires="verl>=0.9",
    wrapper=on_correct,
    contract=Contract(
        params=("config",),
        exists=(
            "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is",
            "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is_threshold",
            "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch",
        ),
    ),
    evidence="optional",
    when="anywhere=fp8.verl.compute_old_log_prob",
    why="Tokens sampled from a quantized policy are trained on as if sampled from the trainer's; verl's "
    "correction for that is off by default.",
    how="Sets rollout_correction.rollout_is=token with cap 2 if rollouts are quantized and the config sets "
    "no correction, logs it, and writes it into the ledger. Warns if ratios meet truncated sampling.",
    remove_when="verl switches it on by itself for quantized rollouts.",
)

LOGPROBS = validate_config_patch(
    id="fp8.verl.validate_config_logprobs",
    requires="verl>=0.9",
    wrapper=on_logprobs,
    contract=Contract(
        params=("config",), exists=("verl.workers.config.rollout:RolloutConfig.logprobs_mode",)
    ),
    evidence="optional",
    native=_natively,
    why="Logprobs before temperature, top-k and top-p are not those that tokens were sampled with.",
    how="Asks for processed logprobs if verl's defaults do not.",
    remove_when="no supported verl has other defaults.",
)
