"""One verdict, made of statements: how the job ended, what its names did, and the same word from every command."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from live_rows import entry, patch, row
from machine import limit

from flashpatch import conditions, registry
from flashpatch.ledger.runs import Run
from flashpatch.verify import ends, statements
from flashpatch.verify.job.commands import runs
from flashpatch.verify.live import judge

JOB = "from toyfw.engine import Engine\nEngine().update(41)\n"
ENDS = {
    "": ("returned", "proven"),
    "raise ValueError('it is lost')": ("ValueError: it is lost", "not proven"),
    "import os; os.kill(os.getpid(), 9)": ("killed", "not proven"),
    "raise KeyboardInterrupt": ("interrupted", "proven"),
    "try: 1 / 0\nexcept Exception: import sys; sys.exit(1)": (
        "ZeroDivisionError: division by zero",
        "not proven",
    ),
    "import flashpatch; flashpatch.disable('toy')": ("returned", "proven"),
}


def job(site: Path, home: Path, code: str, names: str = "toy") -> None:
    """Run a job in an interpreter of its own, however it ends."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    env = {**clean, "PYTHONPATH": str(site), "FLASHPATCH": names, "FLASHPATCH_LEDGER": str(home)}
    subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=limit(60))


@pytest.mark.parametrize(("end", "said"), ENDS.items(), ids=[how for how, _ in ENDS.values()])
def test_the_five_commands_say_the_same_of_how_a_job_ended(site, tmp_path, verify, run, end, said):
    job(site, tmp_path / "ledger", JOB + end)
    command = "import sys; from flashpatch.cli import main; sys.exit(main(sys.argv[1:]))"
    where = ("--ledger", str(tmp_path / "ledger"), "--json")
    names = ("report", "watch", "metrics", "runs")
    told = {name: json.loads(run("-c", command, name, *where).stdout) for name in names}
    told["runs"] = told["runs"][0]
    live = verify("--live", "--json")
    told["live"] = json.loads(live.stdout)
    assert {one["verdict"] for one in told.values()} == {said[1]}, told
    assert told["live"]["ended"] == told["report"]["how"] == said[0]
    assert (live.returncode == 0) == (said[1] == "proven") == (not told["live"]["problems"])
    assert said[1] == "proven" or told["live"]["problems"][0].startswith(
        ("the job was killed", "the job failed")
    )


def test_a_selection_that_cannot_be_obeyed_writes_a_row_where_a_framework_is_at_work(site, tmp_path, verify):
    (site / "vllm" / "engine").mkdir(parents=True)
    (site / "vllm" / "__init__.py").touch()
    (site / "vllm" / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    def create_engine_config(self): ...\n"
    )
    job(site, tmp_path / "ledger", "import json", "fp9")
    assert not (tmp_path / "ledger").exists(), "not every process of a shell is a job"
    job(site, tmp_path / "ledger", "import vllm.engine.arg_utils", "fp9")
    done = verify("--live")
    assert done.returncode == 1 and "unknown name 'fp9'" in done.stdout, done.stdout


STEP, HEAR = patch("fam.toy.step", "step", "engine-core"), patch("fam.toy.hear", "step", "engine-core")


@pytest.mark.parametrize(("ended", "calls", "alarm"), [("", 1, False), ("", 2, True), ("returned", 1, True)])
def test_a_step_that_has_not_ended_makes_nothing_due(ended, calls, alarm):
    patches = {STEP.id: entry("live", calls), HEAR.id: entry("installed")}
    core = replace(row("engine-core", "driver", patches=patches), ended=ended)
    found = judge(Run("r", [core]), {one.id: one for one in (STEP, HEAR)}).problems
    assert any(HEAR.id in problem for problem in found) == alarm


def eagle(ended="returned", **notes):
    patches = {"eagle.vllm.schedule": entry("live", 9), "eagle.vllm.update_from_output": entry("live", 9)}
    one = row("engine-core", "driver", patches=patches, steps=9, **notes)
    on = {"eagle": {"name": "eagle", "options": {"capture_rate": 0.0}}}
    return judge(Run("r", [replace(one, on=on, ended=ended)]), registry.patches())


def test_what_is_asked_for_and_not_seen_is_a_line_and_a_note_that_says_off_is_too():
    found = eagle(eagle_problem="no samples")
    assert found.verdict == "not proven"
    assert "eagle: not seen: drafts were verified, though adapt is true" in " ".join(found.problems)
    assert found.remarks == ("engine-core+driver far:10 noted eagle_problem: no samples",)
    off = eagle(eagle_bandit_off="full graphs")
    assert off.verdict == "proven" and off.remarks, "nothing else was asked for, and it is said"
    seen = eagle(eagle_bandit={"drafted": 30, "arm": "3_1_4"})
    assert seen.verdict == "proven" and not seen.lines
    assert {one.what: one.seen for one in seen.stated}["drafts were verified"] == "eagle_bandit.drafted 30"
    assert eagle(ended="").verdict == "not yet", "it may come; and that is no alarm"
    assert eagle(ended="").problems == () and eagle(ended=None).verdict == "proven", "an old ledger"


def test_what_families_state_names_patches_and_options_that_there_are():
    known = registry.families()
    for family, stated in statements.table().items():
        for terms in (conditions.parse(text) for conditions_ in stated.values() for text in conditions_):
            for term in terms:
                assert term.key in ("noted", "anywhere") or term.key in known[family].options, term
                assert term.key != "anywhere" or set(term.values) <= set(registry.patches()), term
    assert statements.table().keys() == known.keys()


def test_ranks_of_one_engine_are_found_on_any_host():
    def rank(number: int, host: str, engine: str, version: int):
        one = row(
            "worker",
            pid=number + 5,
            ppid=number + 50,
            host=host,
            policy_version=version,
            policy_state="ready",
        )
        return replace(one, rank={"tp": number}, engine=engine)

    split = judge(Run("r", [rank(0, "a", "x", 3), rank(1, "b", "x", 2)]), {}).problems
    assert [problem.partition(":")[0] for problem in split] == [
        "the ranks of one engine hold several policy versions"
    ]
    assert judge(Run("r", [rank(0, "a", "x", 3), rank(1, "a", "y", 2)]), {}).problems == ()


def test_a_job_is_over_when_its_first_process_is_though_actors_of_others_still_close():
    first = replace(row("driver", pid=1, ppid=0, host=os.uname().nodename), ended="returned")
    closing = replace(
        row("driver", pid=os.getpid(), ppid=9, start="", host=first.host), title="TaskRunnerV1", ended=""
    )
    assert closing.alive and ends.of_process(closing) == ends.RUNNING
    assert ends.of_job([first, closing]) == ends.RETURNED


def test_an_ended_run_is_summed_up_once_and_what_waits_is_written_once(site, tmp_path, monkeypatch):
    job(site, tmp_path / "ledger", "import os, sys\nfor _ in range(2):\n    if not os.fork(): break\n" + JOB)
    [folder] = (tmp_path / "ledger").iterdir()
    assert len(list(folder.glob("row-*"))) == 3 and len(list(folder.glob("idle-*"))) <= 2
    before, first = folder.stat().st_mtime_ns, runs._about(folder)
    monkeypatch.setattr(runs.collect, "read", None)
    assert runs._about(folder) == first and folder.stat().st_mtime_ns == before
    os.utime(next(folder.glob("row-*")))
    with pytest.raises(TypeError):
        runs._about(folder)
