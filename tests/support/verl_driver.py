"""Do what verl's driver does before it starts anything: compose and validate the configuration, FlashPatch's own
checks around it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cpu_lab

DRIVER = """
import json, logging, pathlib, sys
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
import verl, verl.utils.config
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from flashpatch.patches._shared import verl_config
overrides = json.loads(sys.argv[1])
typed = {text.partition("=")[0].lstrip("+~") for text in overrides}
verl_config.overrides = lambda: set(typed)     # as Hydra tells a driver that it started
verl_config.is_hydra_application = lambda: True
with initialize_config_dir(str(pathlib.Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
    config = compose("ppo_trainer", overrides)
verl.utils.config.validate_config(
    config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
from flashpatch import engine
states = {id: str(status.state) for id, status in engine.statuses().items() if "validate_config" in id}
wanted = json.loads(sys.argv[2])
found = {path: OmegaConf.select(config, path) for path in wanted}
found = {path: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
         for path, value in found.items()}
print("FOUND" + json.dumps({"settings": found, "states": states}))
"""


def validated(
    overrides: Iterable[str], folder: Path, wanted: Iterable[str] = (), **variables: str
) -> tuple[dict[str, Any], str]:
    """Return what the driver found, and everything that it said.

    ``overrides``: verl's command line; ``folder``: for the ledger; ``wanted``: settings to return as they are after validation;
    ``variables``: FlashPatch's."""
    given = [json.dumps(list(overrides)), json.dumps(list(wanted))]
    done = cpu_lab.python(DRIVER, folder, arguments=given, **variables)
    assert done.returncode == 0, cpu_lab.tail(done)
    [found] = [line[5:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(found), done.stdout + done.stderr


def refused(overrides: Iterable[str], folder: Path, **variables: str) -> str:
    """Return what the driver says, which must fail."""
    done = cpu_lab.python(DRIVER, folder, arguments=[json.dumps(list(overrides)), "[]"], **variables)
    assert done.returncode != 0, cpu_lab.tail(done)
    return done.stderr
