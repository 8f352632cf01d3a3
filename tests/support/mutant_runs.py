"""Run ``flashpatch-verify FAMILY`` and ``--live`` in this process over one mutant of `mutants`, and list the mutants of a family."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_lab
import mutants
import verify_command
import warm

from flashpatch import registry
from flashpatch.verify import cli


class Verdict(NamedTuple):
    """What the command said: its exit status, the family's report, and that of ``--live`` over the same ledger."""

    code: int
    family: dict[str, Any]
    live: int

    @property
    def by(self) -> list[str]:
        """What gave the alarm: proofs that failed, and ``--live``; empty if nothing did."""
        failed = [proof["what"] for proof in self.family["proofs"] if not proof["ok"]]
        return [*failed, *(["--live"] if self.live else [])]


def verdict(
    family: str, folder: Path, mutant: str = "", imported: Sequence[str] = warm.VERL_VLLM, **variables: str
) -> Verdict:
    """Run ``flashpatch-verify FAMILY`` in this process; what it starts is forked, and broken by ``mutant``."""
    own = folder / f"ledger-{len(list(folder.iterdir()))}"
    variables |= {"FLASHPATCH_LEDGER": str(own), mutants.VARIABLE: mutant}
    environment = cpu_lab.environment(folder, **variables)
    said, workdir = verify_command.here(family, folder, environment, (*imported, "mutants"))
    with contextlib.redirect_stdout(io.StringIO()):
        live = cli.main([family, "--live", str(workdir / "ledger"), "--json"])
    return Verdict(said.code, said.family, live)


def generated(clean: Verdict, ranked: bool) -> list[str]:
    """Return the mutants of a family: each kind of each patch that the clean run saw called.

    ``ranked``: the probe runs on ranks that are numbered."""
    known = registry.patches()
    acting = {
        patch["id"]: patch["calls"] > patch["processes"]
        for patch in clean.family["patches"]
        if patch["calls"] and known[patch["id"]].wrapper is not None
    }
    return [
        f"{kind} {id}"
        for id, several in acting.items()
        for kind in mutants.KINDS
        if (kind != "once" or several)
        and (kind != "one_rank" or (ranked and known[id].scope & {"trainer", "worker"}))
    ]


def check_each(
    family: str,
    folder: Path,
    spared: Mapping[str, str],
    *,
    ranked: bool = False,
    more: Sequence[str] = (),
    imported: Sequence[str] = warm.VERL_VLLM,
) -> None:
    """Fail unless each mutant gives an alarm, or is in ``spared``, and a run without one, before and after, gives none.

    ``more`` are mutants beside those generated. Prints what noticed each."""
    clean = verdict(family, folder, imported=imported)
    assert clean.code == 0 and clean.live == 0, f"a clean run gives an alarm: {clean.by}"
    made, unnoticed = [*more, *generated(clean, ranked)], []
    assert made
    for mutant in made:
        seen = verdict(family, folder, mutant, imported)
        print(f"{mutant}: {seen.by or 'NOT NOTICED'}", flush=True)
        if not seen.by:
            unnoticed.append(mutant)
    again = verdict(family, folder, imported=imported)
    assert again.code == 0 and again.live == 0, "not the mutants gave the alarms"
    assert set(unnoticed) <= set(spared), f"{len(unnoticed)} of {len(made)} mutants were not noticed"
