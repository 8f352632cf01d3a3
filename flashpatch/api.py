"""The functions users call: `enable`, `disable`, `status`, `list_patches`, `checksum`; and `start`, behind the front doors."""

from __future__ import annotations

import os
import warnings
from functools import partial
from types import ModuleType
from typing import Any

from flashpatch import engine, ledger, log, registry
from flashpatch.arming import standby
from flashpatch.arming.group import Group
from flashpatch.arming.import_hooks import when_ready
from flashpatch.arming.preflight import module_of
from flashpatch.errors import PatchError
from flashpatch.patch_status import IDLE, Status
from flashpatch.record import Family, Patch
from flashpatch.settings import selections

_obeyed: tuple[int, str | None, str | None] | None = None  # process and environment, when last obeyed or set

CHECKSUM = "flashpatch_checksum"  # name of a call to an engine's workers

_environments = Group(Family("flashpatch", "", ()), "environment", ())
"""Has why that environment cannot be obeyed: engines and trainers raise it, in strict mode each front door too."""


def enable(*names: str, strict: bool | None = None, **options: Any) -> Status:
    """Switch patches on, here and in processes started from now on.

    Before or after the framework is imported, and as often as one likes. What the environment switched on stays on.

    Args:
        names: as in ``FLASHPATCH``; without any, those of the config's ``enable``, else fp8.
        strict: raise `PatchError` where a patch that cannot act is first needed. None leaves it to the
            environment and the config.
        options: options of the families named; each goes to every one of them that has it.

    Returns:
        The status, with a warning if objects that a family must see at birth exist already, or none of its frameworks.

    Raises:
        PatchError: an unknown name or option, or two names of one family. In strict mode also when it is too
            late. Nothing has changed then."""
    standby.wake()
    with engine.switching:
        start()
        current = engine.manager.selection
        selection = selections.extend(current, names, strict, options)
        late = _too_late(selection)
        if late and selection.strict:
            raise PatchError(" ".join(late), advice="Enable before the engine is created.")
        _activate(selection)
    found = _status(late)
    told = [f"{name} {found.counts(name)}" for name in names or found.names]
    for sentence in (*late, *(one for one in told if IDLE in one)):
        warnings.warn(sentence, UserWarning, stacklevel=2)
    return found


def checksum(llm: Any) -> Any:
    """Return checksums of the weights that a vLLM engine runs on, to compare engines of one configuration.

    Equal after an update and on an engine opened on the same checkpoint, on every rank; equal on all replicas.

    Args:
        llm: ``vllm.LLM``, or an asynchronous engine, for which the result must be awaited.

    Returns:
        Per rank, the role of a model (``target``, ``drafter``) to 16 hexadecimal digits.

    Raises:
        PatchError: FlashPatch does not follow the weights of this engine: fp8, int8 or bf16 was off when it opened."""
    try:
        return llm.collective_rpc(CHECKSUM)
    except Exception as error:
        if CHECKSUM not in str(error):
            raise
        raise PatchError(
            "FlashPatch does not follow the weights of this engine",
            advice="Enable fp8, int8 or bf16 before the engine is opened.",
        ) from error


def disable(*names: str) -> Status:
    """Switch patches off, all without names: restore what was patched, and withdraw it from the environment.

    If other code wrapped our wrapper in turn, ours stays as a mere pass-through and its state is
    ``displaced``.

    Raises:
        PatchError: an unknown name; nothing has changed then."""
    standby.wake()
    with engine.switching:
        _activate(selections.reduce(engine.manager.selection, names))
    return status()


def status() -> Status:
    """The state of every known patch in this process, by id; prints as a table."""
    standby.wake()
    return _status()


def list_patches() -> dict[str, Patch]:
    """Every known patch by id, on or off."""
    return registry.patches()


def start() -> None:
    """Obey the environment, see `flashpatch.bootstrap.start`."""
    standby.wake()
    with engine.switching:
        if os.environ.get("FLASHPATCH", "") in ("", "0"):
            return
        if _environment() == _obeyed:
            if _environments.refusal is not None and _is_strict():
                raise _environments.refusal
            engine.manager.sweep()
            return
        try:
            log.configure()
            selection = selections.from_environment(engine.manager.selection)
        except PatchError as error:
            _refuse(error)
            return
        for sentence in _too_late(selection):
            log.log.warning("%s", sentence)
        _activate(selection)


def adopt(environment: tuple[str | None, str | None]) -> None:
    """Switch on what `flashpatch.arming.standby` exported, whatever the environment has become since.

    Modules that are loaded are not armed here. Names and options were checked; if something is wrong with
    them nevertheless, it is logged, and raised by the first engine, in strict mode by the next front door."""
    global _obeyed
    _obeyed = (os.getpid(), *environment)
    asked, resolved = environment
    try:
        log.configure()
        selection = selections.inherited(asked or "", resolved or "")
    except PatchError as error:
        _guard_all(error)
    else:
        engine.manager.activate(selection or selections.NOTHING, arm=False)


def _status(late: tuple[str, ...] = ()) -> Status:
    with engine.switching:
        engine.manager.sweep()
        selection = engine.manager.selection
        return Status(engine.statuses(), selection.names, selection.strict, late, engine.problem)


def _activate(selection: selections.Selection) -> None:
    global _obeyed
    engine.problem = _environments.refusal = None
    _environments.remove_guards()
    engine.manager.activate(selection)
    selections.export(selection)
    _obeyed = _environment()


def _refuse(error: PatchError) -> None:
    """The environment cannot be obeyed: say so once per process and setting, and raise in strict mode."""
    global _obeyed
    _obeyed = _environment()
    _guard_all(error)
    if _is_strict():
        raise error


def _guard_all(error: PatchError) -> None:
    """Let no engine and no trainer start without what was asked for: what families refuse raises ``error``."""
    engine.problem, _environments.refusal = str(error), error
    log.log.error("%s", error)
    for target in {target for family in registry.families().values() for target in family.refuses}:
        when_ready(module_of(target), partial(_guard, target))


def _guard(target: str, module: ModuleType) -> None:
    if _environments.refusal is not None:
        ledger.boot()  # a framework is at work: its row has the reason
        _environments.guard(target, module)


def _is_strict() -> bool:
    return os.environ.get("FLASHPATCH_STRICT", "") not in ("", "0")


def _too_late(selection: selections.Selection) -> tuple[str, ...]:
    """Note and return what families that are switched on only now, or under another name, have missed."""
    on = {family: choice.name for family, choice in engine.manager.selection.choices.items()}
    joining = [registry.family(f) for f, choice in selection.choices.items() if on.get(f) != choice.name]
    missed = {family.name: family.too_late() for family in joining if family.too_late is not None}
    if any(missed.values()) or "late" in ledger.notes():
        ledger.note(late={**ledger.notes().get("late", {}), **missed})
    return tuple(filter(None, missed.values()))


def _environment() -> tuple[int, str | None, str | None]:
    return os.getpid(), os.environ.get("FLASHPATCH"), os.environ.get("FLASHPATCH_RESOLVED")
