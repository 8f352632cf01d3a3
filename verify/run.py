"""Run the probes of families, and judge their observations beside what the patched processes wrote."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from flashpatch import ledger, registry
from flashpatch.arming.preflight import examine, packages
from flashpatch.contracts import versions
from flashpatch.evidence import explain
from flashpatch.ledger.runs import Row, Run
from flashpatch.record import Family, Patch, State
from flashpatch.settings import selections
from flashpatch.verify import live, probes
from flashpatch.verify.due import called as called_in
from flashpatch.verify.probes import jobs
from flashpatch.verify.proof import Proof

Probe = Callable[[str, Path], list[Proof]]

PARTS = {"lora": ("bf16", "flashpatch.verify.probes.fp8.lora_probe")}
"""By the name of a part of a family that has a probe of its own: the name that switches it on, and the probe's module."""

GOOD = frozenset({"live", "installed", "superseded", "disabled"})
_FURTHEST = ("failed", "displaced", "skipped", "live", "installed", "superseded", "waiting", "disabled")


@dataclass(frozen=True)
class PatchReport:
    """The state of one patch while its family's probe ran; ``framework`` is distribution and version, empty if not installed."""

    id: str
    state: State
    evidence: str
    framework: str
    tested: bool


@dataclass(frozen=True)
class FamilyReport:
    """What became of one family, by the name that the user typed, with the verdict of `live.judge` on the probe's processes; ``ok``
    is None if no framework that it patches is installed."""

    family: str
    name: str
    ok: bool | None
    proofs: tuple[Proof, ...]
    patches: tuple[PatchReport, ...]
    workdir: str = ""
    verdict: str = ""


def selected(names: Sequence[str]) -> list[tuple[selections.Selection, str]]:
    """Return one selection per family to verify, and the name of the part of it, empty for all: those named, else those that
    the environment switches on. Raises PatchError for an unknown name, or settings that cannot be read."""
    if names:
        typed = [(PARTS[name][0], name) if name in PARTS else (name, "") for name in names]
        for name, _ in typed:
            registry.family_of(name, PARTS)
        return [(selections.extend(selections.NOTHING, [name], None, {}), part) for name, part in typed]
    on = selections.from_environment(selections.NOTHING)
    return [(selections.Selection({family: choice}, on.strict), "") for family, choice in on.choices.items()]


def verify(selection: selections.Selection, progress: Callable[[str], None], part: str = "") -> FamilyReport:
    """Probe the one family of ``selection``, or a part of it that `PARTS` names, and report by the name the user typed.

    The working directory is kept if anything failed."""
    [(family_name, choice)] = selection.choices.items()
    family, name = registry.family(family_name), part or choice.name
    found = {patch.id: _owner(patch) for patch in family.patches}
    if not any(found.values()):
        progress(f"{name}: no framework it patches is installed")
        return FamilyReport(family.name, name, None, (), tuple(map(_not_installed, family.patches)))
    workdir, nonce = Path(tempfile.mkdtemp(prefix="flashpatch-verify-")), f"verify-{secrets.token_hex(8)}"
    # The probe's processes inherit this: the one family, a new ledger and run.
    own = {"FLASHPATCH_LEDGER": str(workdir / "ledger"), "FLASHPATCH_RUN": nonce}
    with mock.patch.dict(os.environ, own), ExitStack() as if_ended:
        if_ended.callback(shutil.rmtree, workdir)
        selections.export(selection)
        proofs = list(_observe(family, name, nonce, workdir, progress))
        written = {run.id: run for run in ledger.read(workdir / "ledger")}
        if_ended.pop_all()
    run = written.get(nonce, Run(nonce))
    rows = [row for row in run.rows if row.pid != os.getpid()]
    reports = tuple(
        _not_installed(patch) if (owner := found[patch.id]) is None else _report(patch, owner, rows)
        for patch in family.patches
    )
    known = {patch.id: patch for patch in family.patches if found[patch.id] is not None}
    judged = live.judge(run, known, {family.name: choice.name})
    what = "the probe's processes wrote the nonce and carry what is due"
    seen = "; ".join(judged.lines) or f"{len(rows)} processes under {nonce}"
    proofs.append(Proof(name, what, judged.ok, seen))
    idle = _unused(family, rows) | _paths_not_taken(family)
    states = [
        r.state.word for r in reports if r.framework and not (r.state.word == "waiting" and r.id in idle)
    ]
    ok = all(proof.ok for proof in proofs) and all(word in GOOD for word in states)
    kept = "" if ok else str(workdir)
    if ok:
        shutil.rmtree(workdir)
    return FamilyReport(family.name, name, ok, tuple(proofs), reports, kept, judged.verdict)


def find_probe(family: Family) -> Probe | None:
    """Return the probe of a family: its own, or for a built-in one `flashpatch.verify.probes.FAMILY.probe.probe`."""
    if family.probe is not None:
        return family.probe
    package = f"{probes.__name__}.{family.name}"
    return import_module(f"{package}.probe").probe if find_spec(package) is not None else None


def _observe(
    family: Family, name: str, nonce: str, workdir: Path, progress: Callable[[str], None]
) -> Iterator[Proof]:
    """Run the family's probe; ``name`` stands for the family in what is reported."""
    probe = import_module(PARTS[name][1]).probe if name in PARTS else find_probe(family)
    if probe is None:
        yield Proof(name, "the family has a probe", False, "it has none: nothing can be observed")
        return
    progress(f"{name}: probing")
    began = time.monotonic()
    try:
        with mock.patch.object(jobs, "hear", lambda line: progress(f"{name}: {line}")):
            proofs = probe(nonce, workdir) or [Proof(name, "the probe observes", False, "it saw nothing")]
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        spent = time.monotonic() - began
        proofs = [Proof(name, "the probe runs", False, f"{type(error).__name__}: {error}", spent)]
    for proof in proofs:
        yield replace(proof, subject=name) if proof.subject == family.name else proof


def _report(patch: Patch, owner: versions.Installed, rows: list[Row]) -> PatchReport:
    """Return the patch's state over the processes that wrote a row under the nonce: a failure if there is one,
    else the most advanced state."""
    seen = [(row, row.patches[patch.id]) for row in rows if patch.id in row.patches]
    called = [(row, entry["calls"]) for row, entry in seen if entry["calls"]]
    anywhere = {id for row in rows for id in called_in(row)}
    first = min((entry for _, entry in seen), key=lambda one: _FURTHEST.index(one["state"]), default=None)
    if first is None and any(row.on.get(patch.family, {}).get("off") for row in rows):
        state = State("disabled")
    elif first is None:
        state = State("failed", "no process of the probe carried it")
    elif first["state"] == "installed" and not _may_be_idle(patch, anywhere):
        state = State("failed", "installed, but never called")
    else:
        state = State(first["state"], first.get("detail", ""))
    evidence = ", ".join(f"{calls} calls in {'+'.join(row.roles)} {row.pid}" for row, calls in called)
    if not evidence:
        evidence = f"due {explain(patch)}" if _is_of_a_path(patch) else "none"
    return PatchReport(patch.id, state, evidence, str(owner), patch.tested_on(owner.version))


def _unused(family: Family, rows: list[Row]) -> set[str]:
    """Return the ids of patches for frameworks that the probe did not use, if it used another: only ``--live`` verifies those."""
    used = {id.split(".")[1] for row in rows for id, entry in row.patches.items() if entry["calls"]}
    used &= {patch.framework for patch in family.patches}
    return {patch.id for patch in family.patches if used and patch.framework not in used}


def _paths_not_taken(family: Family) -> set[str]:
    """Return the ids of patches that are due only on a path, and could be installed as soon as its module is imported."""
    return {patch.id for patch in family.patches if _is_of_a_path(patch) and examine(patch).problem is None}


def _is_of_a_path(patch: Patch) -> bool:
    """Whether a healthy process may never call the patch. What is due of such, `live.judge` says."""
    return patch.evidence in ("fault", "optional") or bool(patch.when or patch.one_of)


def _may_be_idle(patch: Patch, called: Collection[str]) -> bool:
    """Whether a patch that was never called is healthy while these were."""
    if patch.one_of and patch.evidence in ("update", "step") and not patch.when:
        return any(id in called for id in patch.one_of)
    return patch.evidence == "install" or _is_of_a_path(patch)


def _not_installed(patch: Patch) -> PatchReport:
    absent = ", ".join(sorted(packages(patch)))
    return PatchReport(patch.id, State("skipped", f"{absent} is not installed"), "none", "", False)


def _owner(patch: Patch) -> versions.Installed | None:
    owners = (versions.owner(package) for package in sorted(packages(patch)))
    return next((owner for owner in owners if owner is not None), None)
