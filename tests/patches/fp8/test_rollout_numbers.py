"""Numbers wait for the trainer's next log, and engines in other processes of the job are heard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import machine

from flashpatch.patches.fp8.rollout_numbers import RolloutNumbers

ENGINE = """
import sys
from flashpatch import ledger
ledger.boot()
ledger.note(policy_version=int(sys.argv[1]), **{name: 1 for name in sys.argv[2:]})
ledger.flush()
print("ready", flush=True)
sys.stdin.read()
"""

TRAINER = """
import json
from flashpatch import ledger
from flashpatch.patches.fp8 import rollout_numbers
ledger.boot()
print(json.dumps(rollout_numbers.of_engines()))
"""


def test_the_mean_is_taken_of_versions_the_last_and_of_suspicion_the_largest() -> None:
    numbers = RolloutNumbers()
    numbers.add({"mismatch/k3": 1, "sync/policy_version": 4})
    numbers.add({"mismatch/k3": 3, "sync/policy_version": 5})
    assert numbers.take() == {"mismatch/k3": 2, "sync/policy_version": 5}
    assert numbers.take() == {}


def test_the_oldest_policy_of_living_engines_and_all_refusals(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
    env = {**clean, "FLASHPATCH_LEDGER": str(tmp_path), "FLASHPATCH_RUN": "r"}

    def engine(*arguments: str) -> subprocess.Popen[str]:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen([sys.executable, "-c", ENGINE, *arguments], env=env, **pipes)
        assert process.stdout.readline() == "ready\n"
        return process

    def seen() -> dict[str, float]:
        done = machine.run([sys.executable, "-c", TRAINER], 60, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert seen() == {}
    old = engine("3", "updates_refused")
    new = engine("4", "updates_refused", "requests_refused")
    try:
        refused = {"sync/updates_refused": 2, "sync/requests_refused": 1}
        assert seen() == {"sync/policy_version": 3, **refused}
        old.communicate()
        assert seen() == {"sync/policy_version": 4, "sync/updates_refused": 1, "sync/requests_refused": 1}
    finally:
        for process in (old, new):
            process.kill()
            process.wait()
