"""Map or refuse FlashRL's environment variables by name, and refuse FlashRL itself in the same process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flashpatch import user_directories
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.precision.fleet import Entry

PATCH = "fp8.flashrl"
DISTRIBUTION = "flash-llm-rl"
MODULE = "flash_rl.vllm_patch"  # imported by flash_rl where FLASHRL_CONFIG is set; importing it patches vLLM

_OFF = ("", "0")

#: FlashRL's other variables: whether each is mapped, and its counterpart or the reason for refusing it.
#: FLASHRL_CONFIG is read by `flashrl_entries`.
_COUNTERPARTS: Mapping[str, tuple[bool, str]] = {
    "FLASHRL_LOGGING_LEVEL": (
        True,
        "FLASHPATCH_LOG sets the level of our logger; the root logger is left alone",
    ),
    "FLASHRL_LOGGING_FILE": (
        True,
        "each process reports to the ledger, see 'flashpatch status'; for a log file give "
        "the logger flashpatch a handler",
    ),
    "FLASHRL_LMHEAD_FP32": (True, "the lm_head computes in float32, as with the option lm_head='float32'"),
    "FLASHRL_TEST_RELOAD": (
        False,
        "run 'flashpatch-verify fp8', which updates an engine and compares it with a fresh one, and unset it",
    ),
    "FLASHRL_LOGGING_CONFIGURE": (
        True,
        "logging is never configured for you, as with FLASHRL_LOGGING_CONFIGURE=0",
    ),
}


@dataclass(frozen=True)
class Counterpart:
    """Counterpart of one variable of FlashRL.

    Attributes:
        variable: its name.
        value: what it is set to.
        mapped: whether it takes effect; False: it is refused.
        how: how FlashPatch does the same, or what to do instead.
    """

    variable: str
    value: str
    mapped: bool
    how: str


def counterparts(environ: Mapping[str, str] | None = None) -> list[Counterpart]:
    """Return every variable of FlashRL that is set, with its counterpart."""
    environ = os.environ if environ is None else environ
    found = []
    for name in sorted(name for name in environ if name.startswith("FLASHRL_")):
        value = environ[name]
        if name == "FLASHRL_CONFIG":
            found.append(_config_counterpart(value))
        elif name not in _COUNTERPARTS:
            found.append(Counterpart(name, value, False, "it is not a known variable of FlashRL: unset it"))
        else:
            mapped, how = _COUNTERPARTS[name]
            found.append(Counterpart(name, value, mapped or value in _OFF, how))
    return found


def flashrl_entries(environ: Mapping[str, str] | None = None) -> tuple[Entry, ...]:
    """Read the fleet from ``FLASHRL_CONFIG``: one entry if it names a precision, none if it is unset.

    Raises:
        PatchError: it names a precision that has no counterpart here, a file that cannot be used, or
            something to be downloaded.
    """
    environ = os.environ if environ is None else environ
    value = environ.get("FLASHRL_CONFIG", "").strip()
    if not value:
        return ()
    where = "FLASHRL_CONFIG"
    if value in fleet.FLASHRL_NAMES or value in fleet.FLASHRL_REFUSED:
        return (Entry(fleet.flashrl_precision(value, where)),)
    path = Path(user_directories.expand(value))
    if path.exists():
        return fleet.from_flashrl(path)
    raise PatchError(
        f"FLASHRL_CONFIG={value[:80]!r} is neither a precision of FlashRL nor a file here.",
        patch=PATCH,
        advice="Download the file first; nothing is downloaded here. Or set FLASHPATCH=fp8 or bf16 and unset it.",
    )


def entries(precision: str, scheme: str, tables: list[Mapping[str, object]]) -> tuple[Entry, ...]:
    """Return the precisions of replicas, from our own options and ``FLASHRL_CONFIG`` together.

    Args:
        precision: the family's option, a key of `fleet.SCHEMES`.
        scheme: the family's option: vLLM's name, or empty.
        tables: the family's option ``fleet``; empty for none.

    Raises:
        PatchError: the two contradict each other, or a variable of FlashRL is refused.
    """
    for variable in counterparts():
        if not variable.mapped:
            raise PatchError(
                f"{variable.variable}={variable.value[:80]!r}: {variable.how}.",
                patch=PATCH,
                advice="FlashRL's variables are mapped or refused, never ignored.",
            )
    own = fleet.parse(tables, "[[fp8.fleet]]") if tables else ()
    theirs = flashrl_entries()
    if not theirs:
        return own or (Entry(precision, scheme if fleet.takes_scheme(precision) else ""),)
    if own and own != theirs:
        raise PatchError(
            "FLASHRL_CONFIG and [[fp8.fleet]] ask for different fleets.",
            patch=PATCH,
            advice="Unset FLASHRL_CONFIG.",
        )
    if len(theirs) == 1 and theirs[0].precision != precision:
        raise PatchError(
            f"FLASHRL_CONFIG asks for {theirs[0].precision}, FLASHPATCH for {precision}.",
            patch=PATCH,
            advice=f"Set FLASHPATCH={theirs[0].precision}, or unset FLASHRL_CONFIG.",
        )
    return (
        (Entry(precision, scheme if fleet.takes_scheme(precision) else ""),) if len(theirs) == 1 else theirs
    )


def check_not_active() -> None:
    """Refuse to run together with FlashRL: both replace how vLLM loads weights.

    FlashRL is active once it was imported with ``FLASHRL_CONFIG`` set: it has patched vLLM then. While only
    installed it does nothing.

    Raises:
        PatchError: it is active in this process.
    """
    why = _active()
    if why:
        raise PatchError(
            f"FlashRL is active in this process: {why}",
            patch=PATCH,
            version=_version(),
            advice=f"Run 'flashrl cleanup' or 'pip uninstall {DISTRIBUTION}'; FlashPatch reads FLASHRL_CONFIG itself.",
        )


def _active() -> str:
    if MODULE in sys.modules:
        return f"{MODULE} has been imported."
    vllm = sys.modules.get("vllm")
    llm = getattr(vllm, "__dict__", {}).get("LLM")
    marks = [name for name in vars(llm) if name.startswith("beforeflashrl")] if isinstance(llm, type) else []
    return f"vllm.LLM carries its mark {marks[0]}." if marks else ""


def _version() -> str | None:
    try:
        return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:
        return None


def _config_counterpart(value: str) -> Counterpart:
    try:
        found = flashrl_entries({"FLASHRL_CONFIG": value})
    except PatchError as error:
        return Counterpart(
            "FLASHRL_CONFIG", value, False, f"{error.problem} {error.advice or ''}".strip().rstrip(".")
        )
    if not found:
        return Counterpart("FLASHRL_CONFIG", value, True, "empty: no effect")
    if len(found) == 1:
        return Counterpart("FLASHRL_CONFIG", value, True, f"as precision {found[0].precision}")
    return Counterpart(
        "FLASHRL_CONFIG", value, True, f"as a fleet of {', '.join(entry.precision for entry in found)}"
    )
