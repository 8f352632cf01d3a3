"""One verdict, made of statements: how the job ended, what its names did, and the same word from every command."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_rows import entry, patch, row
from machine import limit

from flashpatch import conditions, registry
from flashpatch.ledger.runs import Run, read
from flashpatch.verify import ends, statements
from flashpatch.verify.job.commands import runs
from flashpatch.verify.live import judge

JOB = "from toyfw.engine import Engine\nprint(Engine().update(41), flush=True)\n"
FULL = """
import os
opened = os.open
def full(path, flags, *rest):
    if flags & os.O_CREAT: raise OSError(28, "No space left on device")
    return opened(path, flags, *rest)
os.open = full
raise KeyError("the disk is full")"""
ENDS = {
    "": ("returned", "proven"),
    "raise ValueError('it is lost')": ("ValueError: it is lost", "not proven"),
    "import os; os.kill(os.getpid(), 9)": ("ended without a word", "not proven"),
    "import os; os._exit(3)": ("status 3", "not proven"),
    "import os; os._exit(0)": ("returned", "proven"),
    "import sys\ntry: sys.exit(1)\nexcept SystemExit: pass": ("returned", "proven"),
    "import sys; sys.exit('no policy')": ("status no policy", "not proven"),
    "import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import toyfw.engine, os; os.kill(os.getpid(), 9)'])": (
        "returned",
        "proven",
    ),
    FULL: ("KeyError: 'the disk is full'", "not proven"),
    "1 +": ("SyntaxError: invalid syntax (<string>, line 3)", "not proven"),
    "raise KeyboardInterrupt": ("interrupted", "proven"),
    "try: 1 / 0\nexcept Exception: import sys; sys.exit(1)": (
        "ZeroDivisionError: division by zero",
        "not proven",
    ),
    "import flashpatch; flashpatch.disable('toy')": ("returned", "proven"),
}


def job(
    site: Path, home: Path, code: str, names: str = "toy", run: str = "", script: Path | None = None
) -> None:
    """Run a job in an interpreter of its own, however it ends, as a ``script`` if one is named, else with ``-c``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    env = {**clean, "PYTHONPATH": str(site), "FLASHPATCH": names, "FLASHPATCH_LEDGER": str(home)}
    if script is not None:
        script.parent.mkdir(parents=True)
        script.write_text(code)
    command = [sys.executable, *(["-c", code] if script is None else [str(script)])]
    env |= {"FLASHPATCH_RUN": run} if run else {}
    subprocess.run(command, env=env, capture_output=True, timeout=limit(60))


@pytest.mark.parametrize(("end", "said"), ENDS.items(), ids=[how for how, _ in ENDS.values()])
def test_the_five_commands_and_the_probe_say_the_same_of_a_job(site, tmp_path, verify, run, end, said):
    job(site, tmp_path / "ledger", JOB + end)
    where = ("--ledger", str(tmp_path / "ledger"), "--json")
    names = ("report", "watch", "metrics", "runs")
    told = {name: json.loads(run("-m", "flashpatch", name, *where).stdout) for name in names}
    told["runs"] = told["runs"][0]
    live = verify("--live", "--json")
    told["live"] = json.loads(live.stdout)
    [told["probe"]] = json.loads(verify("toy", "--json", TOY_JOB=JOB + end).stdout)["families"]
    assert {one["verdict"] for one in told.values()} == {said[1]}, told
    assert told["probe"]["ok"] == (said[1] == "proven"), told["probe"]
    assert told["live"]["ended"] == told["report"]["how"] == said[0]
    assert (live.returncode == 0) == (said[1] == "proven") == (not told["live"]["problems"])
    assert said[1] == "proven" or told["live"]["problems"][0].startswith(
        ("the job ended without a word", "the job failed")
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
    on = {"eagle": {"name": "eagle", "options": {}}}
    return judge(Run("r", [replace(one, on=on, ended=ended)]), registry.patches())


def test_what_is_asked_for_and_not_seen_is_a_line_and_a_note_that_says_off_is_too():
    found = eagle(eagle_problem="no samples")
    assert found.verdict == "not proven"
    assert "eagle: not seen: drafts were verified, though adapt is true" in " ".join(found.problems)
    assert found.remarks == (("problem", "engine-core+driver far:10 noted eagle_problem: no samples"),)
    off = eagle(eagle_bandit_off="full graphs")
    assert off.verdict == "proven" and off.remarks, "nothing else was asked for, and it is said"
    seen = eagle(eagle_bandit={"drafted": 30, "arm": "3_1_4"})
    assert seen.verdict == "proven" and not seen.lines
    assert {one.what: one.seen for one in seen.stated}["drafts were verified"] == "eagle_bandit.drafted 30"
    assert "not seen: drafts were verified" in str(eagle("interrupted").problems), "none without a reason"
    assert eagle(ended="").verdict == "not yet", "it may come; and that is no alarm"
    assert eagle(ended="").problems == () and eagle(ended=None).verdict == "proven", "an old ledger"


@pytest.mark.parametrize("state", ["loading", "ready"])
def test_an_engine_that_loads_its_weights_is_not_opened(state):
    patches = {"fp8.vllm.load_weights": entry("live", 1)}
    found = judge(Run("r", [row("worker", patches=patches, policy_state=state, steps=1)]), registry.patches())
    seen = {one.what: one.seen for one in found.stated}
    assert bool(seen["an engine opened, its weights are followed"]) == (state == "ready")


def test_what_families_state_names_patches_and_options_that_there_are():
    known = registry.families()
    for family, stated in statements.table().items():
        for terms in (conditions.parse(text) for conditions_ in stated.values() for text in conditions_):
            for term in terms:
                assert term.key in ("noted", "anywhere") or term.key in known[family].options, term
                assert term.key != "anywhere" or set(term.values) <= set(registry.patches()), term
    assert statements.table().keys() == known.keys()


def test_a_job_is_over_when_its_first_process_is_though_actors_of_others_still_close():
    first = replace(row("driver", pid=1, host=os.uname().nodename), ended="returned")
    closing = row("driver", pid=os.getpid(), ppid=9, start="", host=first.host)
    closing = replace(closing, title="TaskRunnerV1", ended="")
    assert closing.alive and ends.of_process(closing) == ends.RUNNING
    assert ends.of_job([first, closing]) == ends.RETURNED


OTHER = f"import os, subprocess, sys\nother = subprocess.Popen([sys.executable, '-c', {JOB!r}]"
OWN_RUN = "env={**os.environ, 'FLASHPATCH_RUN': 'other'}"
THREAD = "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,))\nt.start()\nt.join()"
HEALTHY = {
    "interrupted in its first step": (1, 1, "import toyfw.engine\nraise KeyboardInterrupt"),
    "a child was killed": (
        1,
        2,
        JOB + "import os\nif not os.fork(): Engine().update(1); os.kill(os.getpid(), 9)\nos.wait()",
    ),
    "another in its session": (1, 2, f"import toyfw.engine\n{OTHER}, start_new_session=True).wait()"),
    "two jobs of one run": (1, 2, f"import toyfw.engine\n{OTHER})\n{JOB}other.wait()"),
    "two jobs at once": (2, 2, f"{OTHER}, {OWN_RUN})\n{JOB}other.wait()"),
    "an exec": (1, 1, f"import os, sys\n{JOB}os.execv(sys.executable, [sys.executable, '-c', {JOB!r}])"),
    "a thread exits": (1, 1, JOB + THREAD),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_a_healthy_job_gives_no_alarm_and_the_process_where_it_began_says_so(site, tmp_path, what):
    runs, processes, code = HEALTHY[what]
    job(site, tmp_path / "ledger", code)
    found = read(tmp_path / "ledger")
    assert (len(found), sum(len(run.rows) for run in found)) == (runs, processes)
    for run in found:
        assert judge(run, {}).problems == ()
        assert ends.of_job(run.rows) == ("interrupted" if "interrupted" in what else "returned")
        [first] = [one for one in run.rows if one.first]
        assert ends.first(run.rows) == [first]
        assert first.ppid == os.getpid() or run.id == "other"


def test_a_run_begins_in_no_process_of_ray_s_own(site, tmp_path):
    """An actor of Ray's starts the command of ``ray job submit``, with the job's variables, and is ended by force."""
    started = f"import toyfw.engine, os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {JOB!r}])\nos.kill(os.getpid(), 9)"
    actor = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"
    job(site, tmp_path / "ledger", started, script=actor)
    [run] = read(tmp_path / "ledger")
    assert sorted((one.first, one.ended) for one in run.rows) == [(False, ""), (True, "returned")]
    assert ends.of_job(run.rows) == "returned"
    assert ends.of_job([one for one in run.rows if not one.first]) == "lost", "its own command said nothing"


def test_a_job_that_was_resumed_ended_as_its_last_try_did(site, tmp_path):
    job(site, tmp_path / "ledger", JOB + "import os; os.kill(os.getpid(), 9)", run="again")
    time.sleep(1.1)  # rows are written to the second
    job(site, tmp_path / "ledger", JOB, run="again")
    [run] = read(tmp_path / "ledger")
    assert len(run.rows) == 2 and all(one.first for one in run.rows)
    assert ends.of_job(run.rows) == "returned"
    assert judge(run, {}).problems == ()


def test_an_ended_run_is_summed_up_once_and_what_waits_is_written_once(site, tmp_path, monkeypatch):
    job(site, tmp_path / "ledger", "import os, sys\nfor _ in range(2):\n    if not os.fork(): break\n" + JOB)
    [folder] = (tmp_path / "ledger").iterdir()
    assert len(list(folder.glob("row-*"))) == 3 and len(list(folder.glob("idle-*"))) <= 2
    before, first = folder.stat().st_mtime_ns, runs._about(folder)
    monkeypatch.setattr(runs.collect, "job", None)
    assert runs._about(folder) == first and folder.stat().st_mtime_ns == before
    os.utime(next(folder.glob("row-*")))
    with pytest.raises(TypeError):
        runs._about(folder)
