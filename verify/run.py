"""Run the probes of families; what their processes wrote is judged as that of any job."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from flashpatch import ledger, registry
from flashpatch.arming.preflight import packages
from flashpatch.contracts import versions
from flashpatch.ledger.runs import Run
from flashpatch.record import Family
from flashpatch.settings import selections
from flashpatch.verify import live, probes
from flashpatch.verify.job import collect
from flashpatch.verify.probes import calls, jobs
from flashpatch.verify.proof import Proof

Probe = Callable[[str, Path], list[Proof]]

PARTS = {"lora": ("bf16", "flashpatch.verify.probes.fp8.lora_probe")}
"""By the name of a part of a family that has a probe of its own: the name that switches it on, and the probe's module."""


@dataclass(frozen=True)
class FamilyReport:
    """What became of one family, by the name that the user typed, with the verdict of `live.judge` on the probe's processes and what
    `collect` says of them. ``absent`` are patches whose framework is not installed; if all are, ``ok`` is None."""

    family: str
    name: str
    ok: bool | None
    proofs: tuple[Proof, ...]
    absent: tuple[str, ...]
    patches: tuple[dict[str, Any], ...] = ()
    about: tuple[tuple[str, str], ...] = ()
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
    own = {patch.id: patch for patch in family.patches}
    absent = tuple(id for id, patch in own.items() if not any(map(versions.owner, packages(patch))))
    if len(absent) == len(own):
        progress(f"{name}: no framework it patches is installed")
        return FamilyReport(family.name, name, None, (), absent)
    workdir, nonce = Path(tempfile.mkdtemp(prefix="flashpatch-verify-")), f"verify-{secrets.token_hex(8)}"
    # The probe's processes inherit this: the one family, a new ledger and run.
    private = {"FLASHPATCH_LEDGER": str(workdir / "ledger"), "FLASHPATCH_RUN": nonce}
    with mock.patch.dict(os.environ, private), ExitStack() as if_ended:
        if_ended.callback(shutil.rmtree, workdir)
        selections.export(selection)
        proofs = list(_observe(family, name, nonce, workdir, progress))
        run = next((one for one in ledger.read(workdir / "ledger") if one.id == nonce), Run(nonce))
        if_ended.pop_all()
    rows = [row for row in run.rows if row.pid != os.getpid()]
    if not part:
        proofs += [replace(proof, subject=name) for proof in calls.counted(rows, family.name)]
    judged = live.judge(run, own, {family.name: choice.name})
    what = "the probe's processes wrote the nonce and carry what is due"
    found = "; ".join(judged.lines) or f"{len(rows)} processes under {nonce}"
    proofs.append(Proof(name, what, judged.ok, found))
    ok = all(proof.ok for proof in proofs)
    if ok:
        shutil.rmtree(workdir)
    patches = tuple(one for one in collect.of_patches(rows, own) if one["id"] in own)
    seen = tuple(proofs), absent, patches, tuple(collect.about(rows))
    return FamilyReport(family.name, name, ok, *seen, str(workdir) * (not ok), judged.verdict)


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
