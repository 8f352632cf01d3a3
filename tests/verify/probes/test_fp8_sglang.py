"""The probe of the fp8 family where SGLang is the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sglang_lab as lab
from machine import limit

from flashpatch.verify.probes.fp8 import sglang_probe

pytestmark = pytest.mark.sglang

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
ENDED = {"job": "", "fresh": ""}
SAME, OTHER = [[-1.0, -2.0]], [[-1.0, -3.0]]


@pytest.mark.full
def test_on_a_real_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "bf16", "--json"],
        env=lab.environment(tmp_path, TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [family] = json.loads(done.stdout)["families"]
    updates = [proof for proof in family["proofs"] if "largest difference" in proof["evidence"]]
    through_verl = 3 if find_spec("verl") else 0
    assert len(updates) == 3 + through_verl, family["proofs"]
    assert all("largest difference 0 to" in update["evidence"] for update in updates)


def weighed(**answers: list[list[float]]) -> list[bool]:
    fresh = answers.pop("fresh", None)
    seen = {"job": {"answers": answers}, "fresh": {"answers": {"before": fresh} if fresh else {}}}
    return [proof.ok for proof in sglang_probe._updates(seen, ENDED)]


def test_how_answers_are_weighed() -> None:
    good = dict(before=SAME, identity=SAME, perturbation=OTHER, fresh=OTHER)
    assert weighed(**good, **{"return": SAME}) == [True, True, True, True]
    assert weighed(**good, **{"return": OTHER}) == [True, True, True, False]
    assert weighed(**good) == [True, True, True, False]
    stale = dict(good, perturbation=SAME, fresh=SAME)
    assert weighed(**stale, **{"return": SAME}) == [True, True, False, True], "an update that changed nothing"
    assert weighed(before=SAME, identity=SAME, perturbation=OTHER)[2] is False, (
        "no fresh engine to compare with"
    )
    assert weighed() == [False, False, False, False]


def test_how_what_verl_sent_is_weighed() -> None:
    answers = dict(before=SAME, fresh=OTHER, identity=OTHER, perturbation=OTHER, **{"return": SAME})
    worker = dict(states=["ready"], tensors=3)
    receipts = [dict(workers=[worker])] * 3

    def weighed(ended: str = "", **seen: object) -> list[bool]:
        found = {"answers": answers, "receipts": receipts, **seen}
        return [proof.ok for proof in sglang_probe._weigh_verl(found, ended)]

    assert weighed() == [True] * 5
    assert weighed(answers={**answers, "identity": SAME})[1] is False
    assert weighed(answers={**answers, "before": OTHER})[2] is False, "an update that changed nothing"
    assert weighed(answers={**answers, "return": OTHER})[3] is False
    assert weighed(receipts=receipts[:2])[4] is False
    assert weighed(receipts=[dict(workers=[])] * 3)[4] is False
    assert weighed(receipts=[dict(workers=[dict(worker, states=["failed"])])] * 3)[4] is False
    assert weighed("verl ended with status 1", answers={}, receipts=[]) == [False] * 5
