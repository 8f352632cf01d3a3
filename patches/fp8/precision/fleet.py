"""Assign several precisions to the replicas of a rollout in turn (mixed fleets).

A fleet is a list of entries; the replica of rank r runs in entry r modulo their number, all its
tensor-parallel ranks alike. Entries come from ``[[fp8.fleet]]`` tables in flashpatch.toml."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashpatch.errors import PatchError, nearest

logger = logging.getLogger("flashpatch.fp8")

PATCH = "fp8.fleet"
VERL_REPLICA_RANK = "VERL_REPLICA_RANK"
"""verl's variable with the number of a replica, in that replica's server."""

#: Names under which vLLM (the last: SGLang) quantizes a bf16 checkpoint itself; empty: that of the precision.
ONLINE = ("", *"fp8 fp8_per_tensor fp8_per_channel fp8_per_block mxfp8 mxfp4 nvfp4_per_token".split())
ONLINE += ("int8_per_channel_weight_only", "w8a8_fp8")

#: Precision to vLLM's name of the quantization; None: the platform's default for it, "": none.
SCHEMES: Mapping[str, str | None] = {
    "bf16": "",
    "fp8": None,
    "fp8_channel": "fp8_per_channel",
    "fp8_tensor": "fp8_per_tensor",
    "int8": "compressed-tensors",
    "int8_weight_only": "torchao",
}
_ENTRIES = 1024


@dataclass(frozen=True)
class Entry:
    """Precision of one replica.

    Attributes:
        precision: a key of ``SCHEMES``.
        scheme: vLLM's name of the quantization, in place of the precision's own."""

    precision: str
    scheme: str = ""

    @property
    def quantization(self) -> str | None:
        """vLLM's name; empty for none, None for the platform's default."""
        return current_name(self.scheme) or SCHEMES[self.precision]


@dataclass(frozen=True)
class Place:
    """Rank of this replica, and the source that gave it."""

    rank: int
    source: str


#: Platform to the scheme that it gets by default.
DEFAULT_SCHEMES: Mapping[str, str] = {"cpu": "fp8_per_channel", "accelerator": "fp8_per_tensor"}


def default_scheme() -> str:
    """Return vLLM's name of the online fp8 scheme that this platform can run."""
    from vllm.platforms import current_platform

    return DEFAULT_SCHEMES["cpu" if current_platform.is_cpu() else "accelerator"]


def current_name(scheme: str) -> str:
    """Return today's name of a scheme: until vLLM 0.31 its ``fp8`` over a bf16 checkpoint meant per-tensor scales, and verl
    takes an engine of that name for one of an fp8 checkpoint."""
    return "fp8_per_tensor" if scheme == "fp8" else scheme


def takes_scheme(precision: str) -> bool:
    """Whether another of vLLM's schemes may stand for this precision."""
    return precision.startswith("fp8")


def parse(tables: Iterable[Mapping[str, Any]], source: str) -> tuple[Entry, ...]:
    """Parse the entries of ``[[fp8.fleet]]`` tables. Raises PatchError for an unknown key or precision, or a value that
    is no string."""
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
        if scheme not in ONLINE or (scheme and not takes_scheme(table["precision"])):
            advice = f"{nearest(scheme, ONLINE[1:])} bf16 and int8 take none."
            raise _refuse(f"the scheme in {where} is {scheme[:40]!r}.", advice)
        entries.append(Entry(table["precision"], scheme))
    if len(entries) > _ENTRIES:
        raise _refuse(f"{source} has {len(entries)} entries.", f"Give at most {_ENTRIES}.")
    return tuple(entries)


def entries(precision: str, scheme: str, tables: Sequence[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """Return the precisions of replicas by the family's options.

    Args:
        precision: a key of `SCHEMES`.
        scheme: vLLM's name, or empty.
        tables: the option ``fleet``; empty for none.

    Raises:
        PatchError: the tables are none of a fleet, or a variable of FlashRL is set, which nothing reads."""
    theirs = sorted(name for name, value in os.environ.items() if name.startswith("FLASHRL_") and value)
    if theirs:
        raise _refuse(
            f"{', '.join(theirs)} is set, and FlashPatch does not read FlashRL's variables.",
            "docs/reference/forks.md has the options that do the same; unset it then.",
        )
    return parse(tables, "[[fp8.fleet]]") or (Entry(precision, scheme if takes_scheme(precision) else ""),)


def place(args: Any, environ: Mapping[str, str] | None = None) -> Place:
    """Find the rank of the replica that the engine of these arguments is.

    verl numbers its replicas in ``VERL_REPLICA_RANK``; under an external launcher (torchrun) the replica is
    the process rank over the ranks of one engine, as in FlashRL; else it is vLLM's data-parallel rank.

    Args:
        args: ``vllm.engine.arg_utils.EngineArgs``.
        environ: for tests.

    Raises:
        PatchError: one engine configuration serves several data-parallel ranks, or a rank is not a number."""
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


def is_excluded(model: str, options: Mapping[str, Any]) -> bool:
    """Return whether the option ``exclude_models`` names the path of a model, so that it keeps its own precision."""
    return any(fnmatch.fnmatch(model, pattern) for pattern in options["exclude_models"])


def announce(model: str, precision: str, options: Mapping[str, Any]) -> None:
    """Log that a model is quantized as it is loaded, which nobody may have asked for, and how to leave it as it is."""
    patterns = list(options["exclude_models"])
    how = (
        f"none of exclude_models={patterns} matches this path"
        if patterns
        else "the option exclude_models names models to leave"
    )
    logger.warning("quantizes %s to %s as it is loaded; %s", model, precision, how)


def check_quantized(model: Any, quantization: str | None, kinds: tuple[type, type], patch: str) -> None:
    """Refuse an engine whose ``quantization`` (the engine's name of it, or None) left every linear layer as it was;
    ``kinds``: its classes of linear layers, and of the method of those that are not quantized. Raises PatchError, which
    names ``patch``, if not one linear layer follows the quantization."""
    linear = [one for one in model.modules() if isinstance(one, kinds[0])] if quantization else []
    if linear and all(isinstance(one.quant_method, kinds[1]) for one in linear):
        raise PatchError(
            f"quantization={quantization!r} leaves all {len(linear)} linear layers of {type(model).__name__} unquantized",
            patch=patch,
            advice="Choose another scheme, with vLLM for example fp8_per_channel.",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    written = environ.get(name, "")
    if not (written.isascii() and written.isdecimal() and len(written) < 10):
        raise _refuse(
            f"{name} is {written[:40]!r}, so the rank of this replica is unknown.", f"Set {name} to a number."
        )
    return int(written)


def _refuse(problem: str, advice: str) -> PatchError:
    return PatchError(problem, patch=PATCH, advice=advice)
