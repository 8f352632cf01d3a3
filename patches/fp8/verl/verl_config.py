"""Read, check and complete the settings of a job before anything starts."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import TARGET, Get, JobConfig, door, forbidden
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.verl import delta_sync, float32_head
from flashpatch.patches.fp8.verl.correction import truncated_sampling
from flashpatch.patches.fp8.verl.correction.mismatch import CAP

logger = logging.getLogger("flashpatch.fp8")

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
MODE, ASKED = f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.calculate_log_probs"

_EXACT = {MODE: "processed_logprobs", ASKED: True}
_COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
_GRACE = 60.0  # seconds in which a certificate that gives up may say so

patches = Patches("fp8", "verl>=0.9", evidence="optional", scope="driver")


@patches.wrap(
    TARGET,
    relies_on=(
        "verl.workers.config.rollout:RolloutConfig.data_parallel_size",
        "verl.workers.config.rollout:RolloutConfig.disaggregation",
    ),
    when="anywhere=fp8.verl.compute_old_log_prob",
    why="Some settings bring weights by ways that an update cannot follow, or fail minutes later.",
    remove_when="never: it states what the family can run.",
)
def validate_config_rollout(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse by name, before anything starts, what the update of a rollout, or a sync of differences, does not support.

    Raises PatchError if settings are not supported; all are named."""
    job = JobConfig(config, patches.of(validate_config_rollout).id)
    job.refuse_checkpoint()
    job.refuse(
        refusals(job.get),
        "rollouts on SGLang cannot be updated with",
        "Change these settings, or take fp8 (int8, bf16) out of FLASHPATCH.",
    )
    result = original(config, *args, **kwargs)
    if delta_sync.is_on():  # other families may have chosen the backend by now
        job.refuse(
            without_differences(job.get),
            "delta_sync does not go with",
            "Change these settings, or set delta_sync=False.",
        )
    return result


def refusals(get: Get) -> Iterator[str]:
    """Yield the settings that are not supported, each with the reason."""
    yield from forbidden(
        get, {f"{ROLLOUT}.qat.enable": "verl writes NVFP4 weights into the layers by itself, past the update"}
    )
    if get(f"{ROLLOUT}.name") != "sglang":
        return
    size = get(f"{ROLLOUT}.data_parallel_size", 1)
    if size not in (None, 1):
        yield f"{ROLLOUT}.data_parallel_size={size} (one engine per replica takes tensors; use several replicas)"
    yield from forbidden(
        get, {f"{ROLLOUT}.disaggregation.enabled": "prefill and decode servers would be updated one by one"}
    )
    backend = get(f"{ROLLOUT}.checkpoint_engine.backend")
    if backend == "delta_sharded":
        yield f"{ROLLOUT}.checkpoint_engine.backend={backend} (it writes past the model's loader)"
    for path in ("lora_rank", "lora.rank"):
        rank = get(f"{MODEL}.{path}")
        reason = _never_sent_adapters(backend) if rank and not get(f"{MODEL}.lora.merge") else ""
        if reason:
            yield f"{MODEL}.{path}={rank} ({reason}; {MODEL}.lora.merge=True goes)"


def _never_sent_adapters(backend: Any) -> str:
    """Return why LoRA adapters do not reach rollouts on the installed SGLang, or an empty string."""
    if backend not in (None, "naive"):
        return f"adapters never travelled to SGLang through {ROLLOUT}.checkpoint_engine.backend={backend}"
    if Version(metadata.version("sglang")) < Version("0.5.21"):
        return "verl's adapters are followed from SGLang 0.5.21 on"
    return ""


def without_differences(get: Get) -> Iterator[str]:
    """Yield the settings with which no differences can be sent, each with the reason."""
    backend = get(f"{ROLLOUT}.checkpoint_engine.backend")
    reasons = {
        **dict.fromkeys((None, "naive"), "trainer and rollouts share their processes, and nothing travels"),
        "delta_sharded": "it sends differences by a wire of its own, past the update's transaction",
        **dict.fromkeys(("mooncake", "kimi_ckpt_engine"), "it casts whatever it carries"),
    }
    if backend in reasons:
        yield f"{ROLLOUT}.checkpoint_engine.backend={backend} ({reasons[backend]})"
    for path in ("lora_rank", "lora.rank"):
        rank = get(f"{MODEL}.{path}")
        if rank and not get(f"{MODEL}.lora.merge"):
            yield f"{MODEL}.{path}={rank} (adapters are all that travels)"


@patches.wrap(
    TARGET,
    why="A gap between rollout and trainer shows as one number while the job trains, and nothing says where it comes from.",
    remove_when="never: verl does not compare them.",
)
def validate_config_certificate(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """With the option certificate, compare an engine opened with the rollout's settings with the trainer's model, module by
    module, in a process of its own that ends before the job's workers start.

    Raises PatchError if, with ``certificate="stop"``, engine and trainer differ or could not be compared."""
    result = original(config, *args, **kwargs)
    options = engine.options("fp8")
    if options["certificate"] != "off":
        ledger.role("driver")
        policy = JobConfig(config, patches.of(validate_config_certificate).id).get("actor_rollout_ref")
        agree, said = certificate(policy, options["certificate_seconds"])
        judge(agree, said, options["certificate"])
    return result


def certificate(policy: Any, seconds: float) -> tuple[bool, str]:
    """Return whether engine and trainer of ``policy``, verl's ``actor_rollout_ref``, agree, and what
    ``flashpatch-verify exact`` printed; it gives up after ``seconds``, 0: never."""
    from flashpatch.patches._shared.child import alone

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(json.dumps({"actor_rollout_ref": policy}))
        of_job = ["--verl", f"--config-path={folder}", "--config-name=job"]
        done = alone(
            ["-c", _COMMAND, "exact", f"--seconds={seconds}", *of_job],
            {**os.environ, "FLASHPATCH_LEDGER": folder},  # its engine is none of the job's
            seconds + _GRACE if seconds else None,
        )
    if done.stdout.strip():
        return done.returncode in (0, 3), done.stdout  # 3: what was compared agrees
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return False, f"cannot compare here: {said[-1]}\n"


def judge(agree: bool, said: str, act: str) -> None:
    """Print a certificate and note it; if engine and trainer do not agree, warn or stop as the option ``act`` says.
    Raises PatchError with "stop"."""
    sys.stderr.write(said)
    verdict = said.partition("\n")[0]
    ledger.note(certificate={"ok": agree, "verdict": verdict})
    if not agree and act == "stop":
        raise PatchError(
            f"the rollout's engine is not the trainer's model: {verdict}.",
            **patches.at(validate_config_certificate),
            advice="Change what differs, or set fp8's option certificate='warn'.",
        )
    if not agree:
        logger.warning("the rollout's engine is not the trainer's model: %s", verdict)


@patches.wrap(
    TARGET,
    relies_on=(
        "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is",
        "verl.trainer.config.algorithm:RolloutCorrectionConfig.rollout_is_threshold",
        "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch",
    ),
    when="anywhere=fp8.verl.compute_old_log_prob",
    why="Tokens sampled from a quantized policy are trained on as if sampled from the trainer's; verl's "
    "correction for that is off by default.",
    remove_when="verl switches it on by itself for quantized rollouts.",
)
def validate_config_correction(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Set rollout_correction.rollout_is=token with cap 2 if rollouts are quantized and the config sets no correction, log it, and
    write it into the ledger; warn if ratios meet truncated sampling.

    Raises PatchError for settings that stand against the option lm_head."""
    job = JobConfig(config, patches.of(validate_config_correction).id)
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
    for path, model in frozen(job.get) if rolled != ("bf16",) else ():
        if not fleet.is_excluded(model, options):
            logger.warning(
                "%s=%s is quantized like the rollouts, though no update reaches it; fp8's option exclude_models=[%r] leaves it as it is",
                path,
                model,
                model,
            )
    float32_head.check(job, options["lm_head"])
    truncated_sampling.report(job.get)
    ledger.note(tis={"on": switched, "why": why, "cap": CAP if switched else None, "rollouts": list(rolled)})
    return original(config, *args, **kwargs)


def frozen(get: Get) -> Iterator[tuple[str, str]]:
    """Yield the models that verl serves beside the policy and never updates: the setting, and the model's path."""
    if get("reward.reward_model.enable"):
        yield "reward.reward_model.model_path", str(get("reward.reward_model.model_path"))
    for name in (get("distillation.teacher_models") or {}) if get("distillation.enabled") else ():
        path = f"distillation.teacher_models.{name}.model_path"
        if get(path):
            yield path, str(get(path))


def precisions(options: Mapping[str, Any], verl_quantization: str | None) -> tuple[str, ...]:
    """Return the precisions of the rollouts, without repetition, by the family's options and verl's own
    ``rollout.quantization``."""
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
        typed: settings given on the command line."""
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


@patches.wrap(
    TARGET,
    relies_on="verl.workers.config.rollout:RolloutConfig.logprobs_mode",
    native=_natively,
    why="Logprobs before temperature, top-k and top-p are not those that tokens were sampled with.",
    remove_when="no supported verl has other defaults.",
)
def validate_config_logprobs(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask for processed logprobs, those that tokens were sampled with, if verl's defaults do not."""
    job = JobConfig(config, patches.of(validate_config_logprobs).id)
    for path, value in _EXACT.items():
        if path not in job.overrides:
            job.set(path, value, "importance ratios need exact logprobs")
    return original(config, *args, **kwargs)


door(patches)
