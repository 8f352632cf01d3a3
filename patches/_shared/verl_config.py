"""Read, check and change verl's configuration in ``verl.utils.config.validate_config``.

Every trainer's driver calls that function first, before it starts any worker. Several families hook it: to
set what they need if the user chose nothing, and to refuse what contradicts them by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError

TARGET = "verl.utils.config:validate_config"

Get = Callable[..., Any]
"""``get(path, default=None)``: read one setting, such as `JobConfig.get`."""


class JobConfig:
    """verl's configuration of one job, for the patch of one family.

    Args:
        config: the ``DictConfig`` that ``validate_config`` gets.
        patch_id: id of the patch; refusals name it, and changes are logged as its family's.

    Attributes:
        overrides: settings named on the command line, see `overrides`.
    """

    def __init__(self, config: Any, patch_id: str) -> None:
        self.config = config
        self.patch_id = patch_id
        self.family = patch_id.partition(".")[0]
        self.overrides = overrides()

    @classmethod
    def open(cls, config: Any, patch_id: str) -> JobConfig:
        """Make one in the driver, which gets its role in the ledger. Raises PatchError if the patch's family cannot act
        in this process."""
        job = cls(config, patch_id)
        engine.require(job.family)
        ledger.role("driver")
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
            PatchError: there is at least one problem; the message has all of them.
        """
        found = list(problems)
        if found:
            raise PatchError(
                f"{summary} {'; '.join(found)}.", patch=self.patch_id, target=TARGET, advice=advice
            )

    def set(self, path: str, value: Any, reason: str = "") -> None:
        """Set one setting and log it as a warning, with the reason; nothing if it has that value already.

        Settings that verl's structure does not know are added.
        """
        from omegaconf import OmegaConf, open_dict

        if self.get(path) == value:
            return
        logging.getLogger(f"flashpatch.{self.family}").warning(
            "%s=%s%s", path, value, f": {reason}" if reason else ""
        )
        with open_dict(self.config):
            OmegaConf.update(self.config, path, value, force_add=True)


def overrides() -> set[str]:
    """Return the settings named on the command line; empty unless this process is a Hydra application."""
    module = _hydra()
    if module is None:
        return set()
    return {override.partition("=")[0].lstrip("+~") for override in module.HydraConfig.get().overrides.task}


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
