"""Each patch that a probe sees acting is broken in each way of `mutants`; ``flashpatch-verify`` or ``--live`` must notice.

The mutants are generated over the records: every patch with a wrapper that is live in a clean run. Two make no difference
and are left out: ``once`` of what is called once, and ``one_rank`` of what runs in no rank of a job, such as a client of rollout
servers. `SPARED` names further ones, each with its reason. A run prints what noticed each mutant.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cpu_lab
import mutants
import pytest
import warm
import warm_ranks

from flashpatch import registry
from flashpatch.verify import cli, run

pytestmark = [pytest.mark.verl, pytest.mark.full]

#: family -> its probe runs on ranks that are numbered
RANKED = {"grpo": True, "cpu": True, "fsdp": True, "flowrl": False}

#: kind and id -> why the probe cannot see it
SPARED: Mapping[str, str] = {
    **dict.fromkeys(
        (f"{kind} cpu.torch.fsdp_param_init" for kind in ("bypass", "one_rank", "once")),
        "vLLM's build for CPUs makes Tensor.pin_memory do nothing in a process that imports it; "
        "tests/patches/cpu/test_installed.py imports none and sees it",
    ),
    "bypass flowrl.verl.compute_advantage": "it changes nothing under the options by default; "
    "test_flowrl.py::test_it_is_live_with_other_options has others",
}


class Verdict(NamedTuple):
    """What the command said: its exit status, the family's report, and that of ``--live`` over the same ledger."""

    code: int
    family: dict[str, Any]
    live: int


def verdict(family: str, folder: Path, mutant: str = "") -> Verdict:
    """Run ``flashpatch-verify FAMILY`` in this process; what it starts is forked, and broken by ``mutant``.

    ``folder`` outlives the call: the warm interpreter has its socket there.
    """
    before = set(folder.iterdir())
    with warm_ranks.used((*warm.VERL_VLLM, "mutants")) as patch:
        own = folder / f"ledger-{len(before)}"
        patch.setattr(
            "os.environ",
            cpu_lab.environment(folder, FLASHPATCH_LEDGER=str(own), **{mutants.VARIABLE: mutant}),
        )
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(
            run, "shutil", types.SimpleNamespace(rmtree=lambda path: None)
        )  # the ledger is read below
        code, said = _command(family, "--json")
        [workdir] = set(folder.glob("flashpatch-verify-*")) - before
        live, _ = _command(family, "--live", str(workdir / "ledger"), "--json")
    [report] = json.loads(said)["families"]
    return Verdict(code, report, live)


def _command(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(list(arguments))
    return code, out.getvalue()


def generated(family: str, clean: Verdict) -> list[str]:
    """Return the mutants of a family: each kind of each patch that the clean run saw called."""
    known = registry.patches()
    acting = {
        patch["id"]: max(map(int, re.findall(r"(\d+) calls", patch["evidence"])))
        for patch in clean.family["patches"]
        if patch["state"]["word"] == "live" and known[patch["id"]].wrapper is not None
    }
    return [
        f"{kind} {id}"
        for id, calls in acting.items()
        for kind in mutants.KINDS
        if (kind != "once" or calls > 1)
        and (kind != "one_rank" or (RANKED[family] and known[id].scope & {"trainer", "worker"}))
    ]


@pytest.mark.parametrize("family", RANKED)
def test_each_mutant_is_noticed(family: str, tmp_path: Path) -> None:
    clean = verdict(family, tmp_path)
    assert clean.code == 0 and clean.live == 0, "a clean run gives an alarm"
    made, unnoticed = generated(family, clean), []
    assert made
    for mutant in made:
        seen = verdict(family, tmp_path, mutant)
        failed = [proof["what"] for proof in seen.family["proofs"] if not proof["ok"]]
        by = [*failed, *(["--live"] if seen.live else [])] or (["a patch's state"] if seen.code else [])
        print(f"{mutant}: {by or 'NOT NOTICED'}", flush=True)
        if seen.code == 0 and seen.live == 0:
            unnoticed.append(mutant)
    again = verdict(family, tmp_path)
    assert again.code == 0 and again.live == 0, "not the mutants gave the alarms"
    assert set(unnoticed) <= set(SPARED), f"{len(unnoticed)} of {len(made)} mutants were not noticed"
