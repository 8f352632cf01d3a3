"""Read, check and change verl's configuration in ``verl.utils.config.validate_config``.

Drivers of verl call that function before they start any worker; what calls it nowhere, such as verl's fully asynchronous
trainer, comes through `door`. Several families hook it: to set what they need if the user chose nothing, and to refuse what
contradicts them by name."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.flow_names import HEAD

TARGET = "verl.utils.config:validate_config"
TRAINER_MODE, STREAM = "trainer.v1.trainer_mode", "stream_async"
START = "verl.trainer.main_ppo:run_ppo"
"""What each driver of a job with rollouts calls before anything starts."""

Get = Callable[..., Any]
"""``get(path, default=None)``: read one setting, such as `JobConfig.get`."""

_seen: dict[str, Any] = {}
"""By patch: the configuration that it saw last in this process."""


class JobConfig:
    """verl's configuration of one job, for the patch of one family.

    Args:
        config: the ``DictConfig`` that ``validate_config`` gets.
        patch_id: id of the patch; refusals name it, and changes are logged as its family's.

    Attributes:
        overrides: settings named on the command line, see `overrides`."""

    def __init__(self, config: Any, patch_id: str) -> None:
        self.config = _seen[patch_id] = config
        self.patch_id = patch_id
        self.family = patch_id.partition(".")[0]
        self.overrides = overrides()

    @classmethod
    def open(cls, config: Any, patch_id: str) -> JobConfig:
        """Make one in the driver, which gets its role in the ledger. Raises PatchError if the patch's family cannot act
        in this process, or the job's checkpoint is of other names."""
        job = cls(config, patch_id)
        engine.require(job.family)
        ledger.role("driver")
        job.refuse_checkpoint()
        return job

    def get(self, path: str, default: Any = None) -> Any:
        """Read one setting as a plain value, mappings and lists as copies; ``default`` if it is absent."""
        from omegaconf import OmegaConf

        value = OmegaConf.select(self.config, path, default=default)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def refuse(self, problems: Iterable[str], summary: str, advice: str) -> None:
        """Raise for all contradicting settings at once, if there are any.

        Args:
            problems: one text per setting: its path, its value, and the reason in parentheses.
            summary: start of the message, such as ``"cannot train with"``.
            advice: what to do.

        Raises:
            PatchError: there is at least one problem; the message has all of them."""
        found = list(problems)
        if found:
            raise PatchError(
                f"{summary} {'; '.join(found)}.", patch=self.patch_id, target=TARGET, advice=advice
            )

    def refuse_checkpoint(self) -> None:
        """Raise PatchError if the job would resume a checkpoint with FlowRL's partition function and has none, the other way
        round, or has one of other layers, which its workers would find out one by one; or with a reference that it would drop."""
        file = saved_model(self.get)
        compares = any(map(self.get, ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")))
        compares = (compares or engine.enabled("flowrl")) and not self.get("trainer.val_only")
        if compares and file is not None and (file.parent / "reference").exists() and not streams(self.get):
            self.refuse(
                [
                    f"{TRAINER_MODE}={self.get(TRAINER_MODE)} (it has a reference of its own, which only {STREAM} loads)"
                ],
                f"cannot resume {file.parent} with",
                f"Move {file.parent / 'reference'} away to go on from the initial model's, as where another job had written it, or "
                f"choose {TRAINER_MODE}={STREAM} and trainer.use_v1=True.",
            )
        if file is None or not is_zipfile(file):
            return
        with ZipFile(file) as saved:
            text = b"".join(saved.read(name) for name in saved.namelist() if name.endswith("data.pkl"))
        held, named = HEAD.encode() in text, re.findall(rf"{HEAD}\.net\.(\d+)\.weight".encode(), text)
        options = engine.options("flowrl") if engine.enabled("flowrl") else {}
        trained, layers = options.get("log_z") == "learned", max(map(int, named), default=0) // 4 + 1
        if held and trained and named and layers != options["num_layers"]:
            self.refuse(
                [f"num_layers={options['num_layers']} (its partition function has {layers})"],
                f"cannot resume {file.parent} with",
                "Set flowrl's num_layers as it was.",
            )
        kinds = "without", "with"
        if held != trained:
            problem = (
                f"{kinds[held]} FlowRL's partition function ({HEAD}), and this job trains {kinds[trained]} it"
            )
            raise PatchError(
                f"cannot resume {file.parent}: it was trained {problem}.",
                patch=self.patch_id,
                target=TARGET,
                advice=f"Go on {kinds[held]} flowrl's log_z='learned' in FLASHPATCH, or anew from its model: python -m "
                f"verl.model_merger merge --backend fsdp --local_dir {file.parent} --target_dir NEW, then "
                "actor_rollout_ref.model.path=NEW trainer.resume_mode=disable.",
            )

    def set(self, path: str, value: Any, reason: str | None = "") -> None:
        """Set one setting and log it as a warning, with the reason, unless that is None; nothing if it has that value already.

        Settings that verl's structure does not know are added."""
        from omegaconf import OmegaConf, open_dict

        if self.get(path) == value:
            return
        if reason is not None:
            logging.getLogger(f"flashpatch.{self.family}").warning(
                "%s=%s%s", path, value, reason and f": {reason}"
            )
        with open_dict(self.config):
            OmegaConf.update(self.config, path, value, force_add=True)


def forbidden(get: Get, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield each setting that is on, with the reason why it may not be."""
    return (f"{path}={value} ({why})" for path, why in reasons.items() if (value := get(path)))


def streams(get: Get) -> bool:
    """Whether the job is to run in grpo's trainer mode `STREAM`."""
    return bool(get("trainer.use_v1", True)) and get(TRAINER_MODE) == STREAM


def saved_model(get: Get) -> Path | None:
    """Return the file with the first rank's part of the model that a job resumes from, as verl's trainers find it."""
    mode, folder = get("trainer.resume_mode"), get("trainer.default_local_dir")
    chosen = get("trainer.resume_from_path") if mode == "resume_path" else None
    if mode == "auto" and folder and (latest := Path(folder, "latest_checkpointed_iteration.txt")).exists():
        chosen = Path(folder, f"global_step_{latest.read_text().strip()}")
    ranks = get("trainer.nnodes", 1) * get("trainer.n_gpus_per_node", 1)
    file = Path(chosen or "", "actor", f"model_world_size_{ranks}_rank_0.pt")  # others are of an older job
    return file if chosen and file.exists() else None


def replaced_losses(get: Get) -> Iterator[str]:
    """Yield the settings with which verl trains its actor by another loss than its loss_mode names, each with the reason; no
    others do, such as QAT, fsdp_turbo, delta_sharded, critics, or distillation beside the task's rewards."""
    yield from forbidden(
        get, {"algorithm.rollout_correction.bypass_mode": "verl has a loss of its own for it"}
    )
    path = "distillation.distillation_loss.use_task_rewards"
    if get("distillation.enabled") and not get(path, True):
        yield f"{path}=False (verl drops the policy's loss for that of distillation)"


def parted_replicas(get: Get) -> Iterator[str]:
    """Yield the settings with which each rank trains a model of its own, unless the name fsdp couples them."""
    ranks = get("trainer.n_gpus_per_node", 1) * get("trainer.nnodes", 1)
    has_critic = get("critic.enable")
    has_critic = get("algorithm.adv_estimator") == "gae" if has_critic is None else has_critic
    for of, sizes in (("actor_rollout_ref.actor", "fsdp_config"), ("critic", "fsdp"))[: 1 + has_critic]:
        parted = get(f"{of}.strategy") == "fsdp" and get(f"{of}.{sizes}.fsdp_size") == 1 < ranks
        if parted and not engine.enabled("fsdp"):
            yield f"{of}.{sizes}.fsdp_size=1 (FSDP1 then averages no gradients over its {ranks} ranks; the name fsdp, or strategy=fsdp2, does)"


def door(patches: Patches) -> None:
    """Add a patch through which those of ``patches`` on `TARGET` get a configuration that nothing validates."""
    checks = [patch for patch in patches if TARGET in patch.targets]

    def run_ppo(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Check and complete a configuration that nothing has validated in the driver, such as that of verl's fully asynchronous
        trainer, as validate_config would."""
        if not any(_seen.get(patch.id) is config for patch in checks):
            states, check = engine.statuses(), _nothing
            for patch in checks:
                if states[patch.id].state.word == "installed":
                    engine.record_call(patch.id)
                    check = partial(patch.wrapper, check)
            check(config)
        return original(config, *args, **kwargs)

    patches.wrap(
        START,
        evidence="optional",
        why="verl's fully asynchronous trainer never calls validate_config, nor need a driver of one's own; one_step_off_policy's "
        "does after it has chosen its workers.",
        remove_when="run_ppo validates the configuration.",
    )(run_ppo)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for verl's validate_config, which refuses what trainers do not have that never call it."""


def overrides() -> set[str]:
    """Return the settings named on the command line; empty unless this process is a Hydra application."""
    module = _hydra()
    if module is None:
        return set()
    return {override.partition("=")[0].lstrip("+~") for override in module.HydraConfig.get().overrides.task}


def overridden() -> Collection[str] | None:
    """Return `overrides`; None if Hydra read no command line."""
    return overrides() if is_hydra_application() else None


def is_hydra_application() -> bool:
    """Whether this process read its configuration from a command line, so that `overrides` tells what was typed."""
    return _hydra() is not None


def _hydra() -> Any:
    module = sys.modules.get("hydra.core.hydra_config")
    return module if module is not None and module.HydraConfig.initialized() else None


def is_chosen(get: Get, path: str, default: Any, overridden: Collection[str] = ()) -> bool:
    """Whether the user chose the value of a setting: not verl's own, ``default``, unless it is among ``overridden``,
    the settings named on the command line (see `overrides`). ``get`` reads the configuration."""
    value = get(path)
    return value is not None and (path in overridden or value != default)
