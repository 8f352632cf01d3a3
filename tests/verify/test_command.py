"""The command from end to end, on a small framework in real processes, honest and sabotaged."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

import flashpatch
from flashpatch.ledger.files import process_start

JOB = """
from toyfw.engine import Engine
engine = Engine()
engine.update(41)
print(engine.generate())
"""


def hurt(line: str) -> str:
    return JOB.replace("engine = ", f"{line}\nengine = ")


def flat(text: str) -> str:
    """Table cells separated by one space."""
    return " ".join(text.split())


def test_a_live_family_passes(verify, tmp_path):
    done = verify("toy", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    [family] = report["families"]
    assert report["ok"] and family["ok"]
    patches = {one["id"]: one for one in family["patches"]}
    for id in ("toy.toyfw.update", "toy.toyfw.fault"):
        one = patches[id]
        assert (one["states"], one["calls"], one["processes"], one["tested"]) == ({"live": 1}, 1, 1, True)
    assert dict(family["about"])["versions"].endswith(", toyfw 1.0")
    assert "toy: probing" in done.stderr and "the update adds one" not in done.stderr, "it is said once"
    assert not list(tmp_path.glob("flashpatch-verify-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_leaves_no_job_and_no_folder(run, tmp_path, number):
    code = f"""
import os, signal, threading, time
signal.signal({number}, signal.SIG_DFL)  # nohup has the command begin without it
from flashpatch.verify import cli, run
from flashpatch.verify.probes import jobs
def probe(nonce, workdir):
    def end():
        while not ((log := workdir / "job.log").exists() and log.read_text()):
            time.sleep(0.05)
        print(log.read_text(), flush=True)
        os.kill(os.getpid(), {number})
    threading.Thread(target=end).start()
    jobs.run([jobs.Command("job", ["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"])], workdir, 60)
run.find_probe = lambda family: probe
raise SystemExit(cli.main(["toy"]))"""
    done = run("-c", code)
    assert done.returncode == 128 + number and process_start(int(done.stdout)) is None
    assert not list(tmp_path.glob("flashpatch-verify-*"))


def test_a_part_of_a_family_passes_under_the_name_that_switches_it_on(run):
    parts = "from flashpatch.verify import cli, run; run.PARTS['part'] = 'toy', 'toyfamily'"
    done = run("-c", f"{parts}; raise SystemExit(cli.main(['part']))")
    assert done.returncode == 0 and flat(done.stdout.splitlines()[-3]).startswith("part 2 of 2"), done.stdout


def test_the_verdict_comes_last(verify):
    told = verify("toy").stdout
    *_, verdict, versions, note = map(flat, told.splitlines())
    assert (verdict, note) == ("toy 2 of 2 2 proven", "--all shows every patch") and "toyfw 1.0" in versions
    assert "toy.toyfw" not in told


def test_an_absent_framework(verify, site):
    (site / "toyfw").rename(site / "elsewhere")
    named = verify("toy")
    assert named.returncode == 1 and "toyfw: not installed, 2 patches wait" in named.stdout
    [family] = json.loads(verify("toy", "--json").stdout)["families"]
    assert family["absent"] == ["toy.toyfw.update", "toy.toyfw.fault"]
    assert verify(FLASHPATCH="toy").returncode == 1, "nothing was proven"


def test_without_names_the_enabled_families_are_verified_and_all_says_of_each_patch_when_it_is_due(verify):
    done = verify("--all", FLASHPATCH="toy", TOY_JOB=JOB.replace("engine.generate()", "42"))
    assert done.returncode == 0, done.stdout
    update, fault = (flat(line) for line in done.stdout.splitlines() if "toy.toyfw" in line)
    assert update == "toy.toyfw.update live in 1 1 calls in 1 process yes"
    assert fault == "toy.toyfw.fault installed in 1 due only on a fault yes"
    done = verify()
    assert done.returncode == 2 and "nothing is switched on" in done.stderr


@pytest.mark.parametrize(
    ("sabotage", "job", "symptom"),
    [
        ("the wrapper was removed", hurt("Engine.update = Engine.update.__wrapped__"), "displaced"),
        ("another tool displaced it", hurt("Engine.update = lambda self, policy: None"), "displaced"),
        ("the wrapper was never called", "import toyfw.engine\nprint(42)", "nothing of it was due"),
        ("the module was never imported", "print(42)", "nothing of it was due"),
        (
            "the worker had no environment",
            "import os, subprocess, sys\n"
            "env = {k: v for k, v in os.environ.items() if not k.startswith('FLASHPATCH')}\n"
            f"subprocess.run([sys.executable, '-c', {JOB!r}], env=env)",
            "nothing of it was due",
        ),
        (
            "nothing was started with the nonce",
            "import os\nenv = {k: v for k, v in os.environ.items() if not k.startswith('FLASHPATCH')}\n"
            f"import sys; os.execve(sys.executable, [sys.executable, '-c', {JOB!r}], env)",
            "the update adds one failed",
        ),
    ],
)
def test_sabotage_is_caught(verify, tmp_path, sabotage, job, symptom):
    done = verify("toy", TOY_JOB=job)
    assert done.returncode == 1, sabotage
    assert symptom in flat(done.stdout) and "NOT proven" in done.stdout.splitlines()[-3]
    [kept] = tmp_path.glob("flashpatch-verify-*")
    assert str(kept) in done.stderr


@pytest.mark.parametrize(
    ("module", "text", "other", "said"),
    [
        ("toyfamily", "policy + 1", "policy", "the update adds one failed 41"),
        ("toyfamily", "wrapper=update,", "apply=lambda _: 1 / 0, undo=print,", "update is failed: ZeroDiv"),
        ("toyfw/engine", "policy)", "weights)", "no longer takes 'policy' (toyfw/engine.py:5)"),
        ("toyfamily", "    command = ", "    open('/nowhere')\n    command = ", "FileNotFoundError: "),
        ("toyfamily", "return [Proof(", "return [] and [Proof(", "it saw nothing"),
    ],
)
def test_a_broken_family_is_caught(verify, site, module, text, other, said):
    file = site / f"{module}.py"
    source = file.read_text()
    assert text in source
    file.write_text(source.replace(text, other))
    done = verify("toy")
    assert done.returncode == 1 and said in flat(done.stdout), done.stdout


def test_wrong_use_and_its_version(verify, tmp_path):
    wrong = verify("lorra")
    assert wrong.returncode == 2 and "Did you mean 'lora'? Known: " in wrong.stderr and "toy" in wrong.stderr
    assert verify("--nonsense").returncode == 2
    assert verify("--live", str(tmp_path / "absent")).returncode == 2
    done = verify("--against", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout) == (2, "") and "absent is neither" in done.stderr
    done = verify("--version")
    assert (done.returncode, done.stdout) == (0, f"flashpatch-verify {flashpatch.__version__}\n")


def test_live_judges_a_finished_job(run, verify):
    assert run("-c", JOB, FLASHPATCH="toy").stdout == "42\n"
    done = verify("--live", "--json")
    assert done.returncode == 0, done.stdout
    [process] = json.loads(done.stdout)["processes"]
    assert process["roles"] == ["worker"] and process["alive"] is False
    assert process["patches"]["toy.toyfw.update"]["calls"] == 1
    lines = verify("--live").stdout.splitlines()
    assert lines[1].split() == ["name", "acted", "in", "calls", "last", "version", "precision", "verdict"]
    assert lines[2].split() == ["toy", "1", "of", "1", "worker", "2", "proven"]
    told = "0 of 1 process alive: it has ended (returned); patches acted in 1, 0 called none"
    assert lines[3] == f"{told} (--all shows each)"
    assert lines[7].split() == ["toy", *"the patches that were due were called 1 of 1".split()]
    title, _, process = verify("--live", "--all").stdout.splitlines()[-3:]
    assert len(lines) == 8 and title == "Processes" and process.endswith("2 of 2        2      ok")


CHILD = '''
import os, subprocess, sys, time
import toyfw.engine
code = """import signal, time; from toyfw.engine import Engine; from flashpatch import ledger
signal.signal(signal.SIGTERM, signal.SIG_IGN); Engine().update(41); ledger.flush(); print('up', flush=True); time.sleep(600)"""
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
assert child.stdout.readline()
print(child.pid, flush=True)
'''


@pytest.mark.parametrize(
    ("end", "said"), [("", "left behind by this job, still alive"), ("child.terminate()", "still closing")]
)
def test_live_names_what_a_job_left_behind_and_what_still_closes(run, verify, end, said):
    child = int(run("-c", f"{CHILD}{end}\nos._exit(0)", FLASHPATCH="toy").stdout)
    try:
        assert f"\n{said}: {child} (worker" in verify("--live").stdout
    finally:
        os.kill(child, signal.SIGKILL)


def test_whoever_ends_a_process_of_the_job_says_so(run, verify):
    run("-c", f"{CHILD}child.kill(); child.wait()", FLASHPATCH="toy")
    report = json.loads(verify("--live", "--json").stdout)
    ended = {one["ended"] for one in report["processes"]}
    [parent] = [one["pid"] for one in report["processes"] if one["ended"] == "returned"]
    assert ended == {"returned", f"SIGKILL from {parent}"} and report["verdict"] == "proven"


EXPECTING = """
import os, subprocess, sys
from flashpatch import ledger
from toyfw.engine import Engine
env = {**os.environ, "FLASHPATCH": sys.argv[1]}
child = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
Engine().update(41), ledger.expect(child.pid, roles=["worker"], families=["toy"]), ledger.flush()
command = [sys.executable, "-c", "from flashpatch.verify.cli import main; main(['--live'])"]
print(child.pid, subprocess.run(command, capture_output=True, text=True).stdout)
child.communicate()
"""


def test_a_process_that_has_just_begun_is_awaited(run):
    pid, _, told = run("-c", EXPECTING, "bf16", FLASHPATCH="toy").stdout.partition(" ")
    assert f"Not yet\nproblem\nworker {os.uname().nodename}:{pid}: wrote no row yet" in told, told


def test_live_names_the_process_that_the_environment_did_not_reach(run, verify):
    pid, _, told = run("-c", EXPECTING, "", FLASHPATCH="toy").stdout.partition(" ")
    done = verify("--live")
    assert "Not proven" in told and f":{pid}: wrote no row, though" in told
    assert done.returncode == 1 and f":{pid}: wrote no row, though" in done.stdout
    assert "missing" in done.stdout
    assert "missing" in verify("--live", "--all").stdout.rpartition("Processes")[2]


def test_a_run_in_which_nothing_was_on_proves_nothing(run, verify):
    run("-c", "from flashpatch import ledger; ledger.boot(); ledger.flush()")
    done = verify("--live")
    assert done.returncode == 1 and "nothing on in this run" in done.stdout


def test_live_chooses_a_run(run, verify):
    for name in ("first", "second"):
        run("-c", JOB, FLASHPATCH="toy", FLASHPATCH_RUN=name)
    assert re.match(r"Run second: -c, began \w+ \d+ \d\d:\d\d, \d+ s ago\n", verify("--live").stdout)
    assert verify("--live", "--run", "first").stdout.startswith("Run first: -c,")
    assert verify("--run", "third").returncode == 2


def test_a_command_is_no_job(run, site, tmp_path):
    """The variable that is left set from a job reaches our own commands too."""
    run("-c", JOB, FLASHPATCH="toy", FLASHPATCH_RUN="job")
    command = tmp_path / "flashpatch-verify"
    command.write_text("import sys; from flashpatch.verify.cli import main; sys.exit(main())")
    left = {"FLASHPATCH": "toy", "FLASHPATCH_LEDGER": str(tmp_path / "ledger"), "PYTHONPATH": str(site)}
    for _ in range(2):
        words = [sys.executable, command, "--live"]
        done = subprocess.run(words, env=os.environ | left, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("Run job: "), done.stdout + done.stderr
    assert os.listdir(tmp_path / "ledger") == ["job"]


def test_a_name_that_acted_nowhere_is_not_proven(run, verify):
    """Even if nothing of it was due."""
    run("-c", "import toyfw.engine", FLASHPATCH="toy")
    done = verify("--live", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["names"][0]["verdict"]) == (1, False, "nothing to prove")
    assert "toy: nothing to prove: nothing of it was due" in verify("--live").stdout


def test_live_without_any_process_and_on_a_directory(verify, run, tmp_path):
    done = verify("toy", "--live")
    assert done.returncode == 1 and "no process with FLASHPATCH set has reported there" in done.stderr
    run("-c", JOB, FLASHPATCH="toy")
    for where in (["--live", str(tmp_path / "ledger")], ["--ledger", str(tmp_path / "ledger")]):
        assert verify(*where, FLASHPATCH_LEDGER=str(tmp_path / "other")).returncode == 0


def test_live_and_a_name_in_either_order(run, verify, tmp_path):
    run("-c", JOB, FLASHPATCH="toy")
    orders = ("--live", "toy"), ("toy", "--live")
    one, other = (verify(*words).stdout.partition("\n")[2] for words in orders)
    assert one == other
    for ledger in ([], ["--ledger", str(tmp_path / "ledger")]):
        done = verify(*ledger, "--live", "toi")
        assert done.returncode == 2 and "unknown name 'toi'" in done.stderr


@pytest.mark.parametrize("arguments", [["toy"], ["toy", "--live"], ["--against", "site"]])
def test_no_report_imports_torch(run, site, arguments):
    (site / "torch.py").touch()
    program = "import sys; from flashpatch.verify.cli import main; main(sys.argv[1:]);"
    done = run("-c", f"{program} print('torch' in sys.modules)", *arguments, FLASHPATCH="toy")
    assert done.stdout.endswith("False\n"), done.stderr
