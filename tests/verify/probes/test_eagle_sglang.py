"""The family's probe where SGLang is the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import eagle_engines as eagles
import pytest
from machine import limit

from flashpatch.patches.eagle.drafter_refit.commands import ACCEPT_LENGTH
from flashpatch.verify.probes.eagle import verl_sglang_probe
from flashpatch.verify.probes.eagle.verl_sglang_job import VERSION

pytestmark = pytest.mark.sglang(least="0.5.21")

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.full
def test_on_a_real_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "eagle", "--json"],
        env=eagles.lab.environment(tmp_path, TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    [family] = json.loads(done.stdout)["families"]
    assert all(one["ok"] for one in family["proofs"]) and len(family["proofs"]) >= 6
    if find_spec("verl"):
        assert any("verl's server" in one["what"] for one in family["proofs"])


def test_how_what_verls_server_answered_is_weighed() -> None:
    tokens = {name: [[1, 2]] for name in ("exact", "noise", "exact again")}
    versions = (0, VERSION + 1, VERSION + 2)

    def flushed(*lengths: float, versions: tuple[int, ...] = versions) -> dict:
        return {n: {"drafter": v, ACCEPT_LENGTH: one} for n, v, one in zip(tokens, versions, lengths)}

    def weighed(ended: str = "", **seen: object) -> list[bool]:
        found = {"tokens": tokens, "flushed": flushed(3.6, 1.1, 3.5), **seen}
        return [proof.ok for proof in verl_sglang_probe.weigh(found, ended)]

    assert weighed() == [True, True]
    assert weighed(tokens={**tokens, "noise": [[1, 3]]}) == [False, True]
    assert weighed(flushed=flushed(3.6, 3.6, 3.6)) == [True, False], "the drafter of noise never arrived"
    assert weighed(flushed=flushed(3.6, 1.1, 1.1)) == [True, False]
    assert weighed(flushed=flushed(3.6, 1.1, 3.5, versions=(0, 0, 0))) == [True, False]
    assert weighed("verl ended with status 1") == [False]
    assert weighed(flushed={}) == [False]
