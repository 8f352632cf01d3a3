"""Assign several precisions to the replicas of a rollout in turn (mixed fleets).

A fleet is a list of entries; the replica of rank r runs in entry r modulo their number, all its
tensor-parallel ranks alike. Entries come from ``[[fp8.fleet]]`` tables in flashpatch.toml, or from FlashRL's
YAML.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.suggest import nearest

PATCH = "fp8.fleet"
VERL_REPLICA_RANK = "VERL_REPLICA_RANK"
"""verl's variable with the number of a replica, in that replica's server."""

#: Precision to vLLM's name of the quantization; None: the platform's default for it, "": none.
SCHEMES: Mapping[str, str | None] = {
    "bf16": "",
    "fp8": None,
    "fp8_channel": "fp8_per_channel",
    "fp8_tensor": "fp8_per_tensor",
    "int8": "compressed-tensors",
    "int8_weight_only": "torchao",
}
#: FlashRL's names of them (the ``_fast`` and ``_vllm`` ones differ in how they update, not in the result).
FLASHRL_NAMES: Mapping[str, str] = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_vllm": "fp8",
    "fp8_fast": "fp8",
    "fp8_vllm_fast": "fp8",
    "fp8_channel": "fp8_channel",
    "fp8_tensor": "fp8_tensor",
}
#: FlashRL's functions that have no counterpart here, and what to do instead.
FLASHRL_REFUSED: Mapping[str, str] = {
    name: "Use fp8 or int8 (FLASHPATCH=int8, with a profile from 'flashpatch profile --flashrl' if there is one)."
    for name in ("int8", "int8_fast", "int8_wo_prune", "int8_prune")
}

_YAML_LIMIT = 1 << 20
_ENTRIES = 1024
_SCHEME = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")


@dataclass(frozen=True)
class Entry:
    """Precision of one replica.

    Attributes:
        precision: a key of ``SCHEMES``.
        scheme: vLLM's name of the quantization, in place of the precision's own.
    """

    precision: str
    scheme: str = ""

    @property
    def quantization(self) -> str | None:
        """vLLM's name; empty for none, None for the platform's default."""
        return self.scheme or SCHEMES[self.precision]


@dataclass(frozen=True)
class Place:
    """Rank of this replica, and the source that gave it."""

    rank: int
    source: str


def default_scheme() -> str:
    """Return vLLM's name of the online fp8 scheme that this platform can run."""
    from vllm.platforms import current_platform

    return "fp8_per_channel" if current_platform.is_cpu() else "fp8"


def takes_scheme(precision: str) -> bool:
    """Whether another of vLLM's schemes may stand for this precision."""
    return precision.startswith("fp8")


def parse(tables: Iterable[Mapping[str, Any]], source: str) -> tuple[Entry, ...]:
    """Parse the entries of ``[[fp8.fleet]]`` tables.

    Raises:
        PatchError: an unknown key or precision, or a value that is no string.
    """
    entries = []
    for number, table in enumerate(tables):
        where = f"entry {number} of {source}"
        for key, value in table.items():
            if key not in ("precision", "scheme"):
                raise _refuse(
                    f"unknown key {str(key)[:40]!r} in {where}.", nearest(str(key), ("precision", "scheme"))
                )
            if not isinstance(value, str):
                raise _refuse(f"{key!r} in {where} is {str(value)[:40]!r}.", "Give a string.")
        if table.get("precision") not in SCHEMES:
            said = table.get("precision", "missing")
            raise _refuse(f"the precision in {where} is {said[:40]!r}.", f"Choose from {', '.join(SCHEMES)}.")
        scheme = table.get("scheme", "")
        if scheme and (not _SCHEME.match(scheme) or not takes_scheme(table["precision"])):
            raise _refuse(
                f"the scheme in {where} is {scheme[:40]!r}.",
                "Give vLLM's name of a quantization, not for bf16 and int8.",
            )
        entries.append(Entry(table["precision"], scheme))
    if len(entries) > _ENTRIES:
        raise _refuse(f"{source} has {len(entries)} entries.", f"Give at most {_ENTRIES}.")
    return tuple(entries)


def from_flashrl(path: Path) -> tuple[Entry, ...]:
    """Read the entries of a FlashRL YAML file (``configs:``, one mapping per data-parallel rank in turn).

    The file is read as plain data. Of each mapping, ``fn`` decides the precision; keys that steer FlashRL's
    own machinery (how to load, what to preserve, the template and profile of fp8) have no meaning here and
    are allowed.

    Raises:
        PatchError: not readable, not such a file, or an entry that has no counterpart here, by name.
    """
    data = _yaml(path)
    configs = data.get("configs") if isinstance(data, dict) else None
    if not isinstance(configs, list) or not configs or not all(isinstance(c, dict) for c in configs):
        raise _refuse(
            f"{path} has no list 'configs' of mappings.", "Give the file that 'flashrl setup' wrote."
        )
    if len(configs) > _ENTRIES:
        raise _refuse(f"{path} has {len(configs)} entries.", f"Give at most {_ENTRIES}.")
    return tuple(_flashrl_entry(config, f"entry {number} of {path}") for number, config in enumerate(configs))


def flashrl_precision(name: Any, where: str) -> str:
    """Return the precision that FlashRL calls ``name``.

    Raises:
        PatchError: it has no counterpart here, or is unknown.
    """
    if isinstance(name, str) and name in FLASHRL_REFUSED:
        raise _refuse(f"{where}: FlashRL's {name!r} cannot be had by this name.", FLASHRL_REFUSED[name])
    if not isinstance(name, str) or name not in FLASHRL_NAMES:
        raise _refuse(
            f"{where}: {str(name)[:40]!r} is no precision of FlashRL.",
            f"Choose from {', '.join(FLASHRL_NAMES)}.",
        )
    return FLASHRL_NAMES[name]


_FLASHRL_OWN = frozenset(
    {"load_format", "distributed_executor_backend", "module_attribute_to_preserve", "params_to_ignore"}
)
#: Where FlashRL finds its quantized template. fp8 needs none: the engine quantizes the trainer's own weights.
_FLASHRL_TEMPLATE = frozenset({"model", "profile"})


def _flashrl_entry(config: Mapping[Any, Any], where: str) -> Entry:
    precision = flashrl_precision(config.get("fn", "int8"), where)
    for key, value in config.items():
        if key in ("fn", "quantization") or key in _FLASHRL_OWN:
            continue
        if key in _FLASHRL_TEMPLATE and (value is None or precision != "bf16"):
            continue
        raise _refuse(
            f"{where}: {str(key)[:40]!r} has no counterpart here.",
            "Remove it, or set it in the training script (rollout.engine_kwargs.vllm).",
        )
    scheme = config.get("quantization")
    if scheme not in (None, "fp8") or (precision == "bf16" and scheme):
        raise _refuse(
            f"{where}: quantization {str(scheme)[:40]!r} with fn {config.get('fn')!r}.", "Remove it."
        )
    return Entry(precision)


def _yaml(path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise _refuse(
            f"{path} is YAML, and PyYAML is not installed.",
            "Install PyYAML, or write [[fp8.fleet]] tables in flashpatch.toml.",
        ) from error
    from flashpatch.patches.fp8.calibration import untrusted

    written = untrusted.text(path, _YAML_LIMIT)
    if re.search(
        r"(^|[\s\[{,:-])[&*][^\s&*]", written
    ):  # anchors make small files large, and FlashRL writes none
        raise _refuse(f"{path} uses YAML anchors.", "Write the entries out.")
    try:
        return yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _refuse(
            f"{path} is not plain YAML ({str(error).splitlines()[0][:80]}).",
            "Give the file that 'flashrl setup' wrote.",
        ) from error


def place(args: Any, environ: Mapping[str, str] | None = None) -> Place:
    """Find the rank of the replica that the engine of these arguments is.

    verl numbers its replicas in ``VERL_REPLICA_RANK``; under an external launcher (torchrun) the replica is
    the process rank over the ranks of one engine, as in FlashRL; else it is vLLM's data-parallel rank.

    Args:
        args: ``vllm.engine.arg_utils.EngineArgs``.
        environ: for tests.

    Raises:
        PatchError: one engine configuration serves several data-parallel ranks, or a rank is not a number.
    """
    environ = os.environ if environ is None else environ
    if VERL_REPLICA_RANK in environ:
        return Place(_number(environ, VERL_REPLICA_RANK), VERL_REPLICA_RANK)
    if getattr(args, "distributed_executor_backend", None) == "external_launcher":
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        return Place(_number(environ, "RANK") // ranks, f"RANK // {ranks}")
    if getattr(args, "data_parallel_rank", None) is not None:
        return Place(args.data_parallel_rank, "data_parallel_rank")
    if getattr(args, "data_parallel_size", 1) > 1:
        raise _refuse(
            f"one engine configuration serves {args.data_parallel_size} data-parallel ranks.",
            "A mixed fleet needs an engine per replica: give each its data_parallel_rank.",
        )
    return Place(0, "the only replica")


def assigned(entries: Sequence[Entry], rank: int) -> Entry:
    """Return the entry of a replica: rank modulo the number of entries."""
    return entries[rank % len(entries)]


def _number(environ: Mapping[str, str], name: str) -> int:
    written = environ.get(name, "")
    if not (written.isascii() and written.isdecimal() and len(written) < 10):
        raise _refuse(
            f"{name} is {written[:40]!r}, so the rank of this replica is unknown.", f"Set {name} to a number."
        )
    return int(written)


def _refuse(problem: str, advice: str) -> PatchError:
    return PatchError(problem, patch=PATCH, advice=advice)
