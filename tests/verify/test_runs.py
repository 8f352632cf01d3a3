"""`flashpatch runs` on a ledger of jobs that ended."""

import json
import os
import re

JOB = "from toyfw.engine import Engine; Engine().update(41)"


def test_runs_are_listed_newest_first_with_their_verdicts(run, verify, tmp_path) -> None:
    listing = ("-m", "flashpatch", "runs", "--ledger", str(tmp_path / "ledger"))
    run("-c", JOB, FLASHPATCH="toy", FLASHPATCH_RUN="acted")
    run("-c", "import toyfw.engine", FLASHPATCH="toy", FLASHPATCH_RUN="idle")
    shown = run(*listing)
    title, columns, *rows, advice = shown.stdout.splitlines()
    assert columns.split() == ["run", "began", "command", "names", "verdict", "alive"]
    cells = [re.split(r"\s{2,}", row) for row in rows]
    assert [(name, *rest) for name, _, *rest in cells] == [
        ("idle", "-c", "toy", "nothing to prove", "0 of 1"),
        ("acted", "-c", "toy", "proven", "0 of 1"),
    ], shown.stderr
    found = json.loads(run(*listing, "--json").stdout)
    assert [(one["run"], one["names"], one["verdict"]) for one in found] == [
        ("idle", ["toy"], "nothing to prove"),
        ("acted", ["toy"], "proven"),
    ]
    os.utime(tmp_path / "ledger" / "acted")
    assert json.loads(run(*listing, "--json").stdout)[0]["run"] == "acted", "it was written to last"
    assert verify("--live").stdout.startswith("Run acted: "), "which is the newest is the same to all"
