"""Compare the rollout's engine with the trainer's model before a job starts, in a process that ends before it does."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import TARGET, JobConfig, validate_config_patch
from flashpatch.record import Contract

logger = logging.getLogger("flashpatch.fp8")

ID = "fp8.verl.validate_config_certificate"
ADVICE = "Change what differs, or set fp8's option certificate='warn'."
COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Print the certificate of the job once all its settings are made.

    Raises:
        PatchError: with ``certificate="stop"``, engine and trainer differ or could not be compared.
    """
    result = original(config, *args, **kwargs)
    options = engine.options("fp8")
    if options["certificate"] != "off":
        ledger.role("driver")
        policy = JobConfig(config, ID).get("actor_rollout_ref")
        agree, said = certificate(policy, options["certificate_seconds"])
        judge(agree, said, options["certificate"])
    return result


def certificate(policy: Any, seconds: float) -> tuple[bool, str]:
    """Return whether engine and trainer agree, and what ``flashpatch-verify exact`` printed.

    Args:
        policy: verl's ``actor_rollout_ref``.
        seconds: after which it gives up; 0: never.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(json.dumps({"actor_rollout_ref": policy}))
        of_job = ["--verl", f"--config-path={folder}", "--config-name=job"]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "exact", f"--seconds={seconds}", *of_job],
            env={**os.environ, "FLASHPATCH_LEDGER": folder},  # its engine is none of the job's
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.stdout.strip():
        return done.returncode == 0, done.stdout
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return False, f"cannot compare here: {said[-1]}\n"


def judge(agree: bool, said: str, act: str) -> None:
    """Print a certificate and note it; if engine and trainer do not agree, warn or stop as the option ``act`` says.

    Raises:
        PatchError: with "stop".
    """
    sys.stderr.write(said)
    verdict = said.partition("\n")[0]
    ledger.note(certificate={"ok": agree, "verdict": verdict})
    if not agree and act == "stop":
        raise PatchError(
            f"the rollout's engine is not the trainer's model: {verdict}.",
            patch=ID,
            target=TARGET,
            advice=ADVICE,
        )
    if not agree:
        logger.warning("the rollout's engine is not the trainer's model: %s", verdict)


PATCH = validate_config_patch(
    id=ID,
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(params=("config",)),
    evidence="optional",
    why="A gap between rollout and trainer shows as one number while the job trains, and nothing says where it comes from.",
    how="With the option certificate, compares an engine opened with the rollout's settings with the trainer's model, "
    "module by module, in a process of its own that ends before the job's workers start.",
    remove_when="never: verl does not compare them.",
)
