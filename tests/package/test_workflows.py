"""The workflows for GitHub ask for what there is. `make lint` checks them against GitHub's schema."""

import re
import shlex
import subprocess

import pytest
from tree import TREE

from flashpatch.verify import cli

yaml = pytest.importorskip("yaml")

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (TREE / ".github/workflows").glob("*.yml")
}
STEPS = [
    pytest.param(step["run"], step, job, id=f"{name}-{job_name}-{number}")
    for name, flow in WORKFLOWS.items()
    for job_name, job in flow["jobs"].items()
    for number, step in enumerate(job["steps"])
    if "run" in step
]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_may_only_read(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert all(
        "permissions" not in job and job["timeout-minutes"] for job in WORKFLOWS[name]["jobs"].values()
    )


@pytest.mark.parametrize(("run", "step", "job"), STEPS)
def test_a_step_runs_targets_and_options_that_exist(run: str, step: dict, job: dict) -> None:
    lanes = job.get("strategy", {}).get("matrix", {}).get("lane", [""])
    for line in (line.replace("${{ matrix.lane }}", lane) for line in run.splitlines() for lane in lanes):
        command, *piped = line.split(" | ")
        words = shlex.split(command)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=TREE, check=True, capture_output=True)
        if words[0] == "flashpatch-verify":
            options = cli._parser().parse_args(words[1:])
            assert options.against
            # Only with a named shell does GitHub switch pipefail on: tee would hide the status.
            assert not piped or step["shell"] == "bash"


def test_every_lane_of_make_test_is_a_job() -> None:
    lanes = {f"test-{lane}" for lane in WORKFLOWS["test"]["jobs"]["engines"]["strategy"]["matrix"]["lane"]}
    makefile = (TREE / "Makefile").read_text()
    recipe = makefile.partition("\ntest: lint\n")[2].partition("\n\n")[0]
    halves = dict(re.findall(r"^(test-[\w-]+):.*\n\t\$\(MAKE\) (test-[\w-]+) PATHS=", makefile, re.M))
    assert lanes == {halves.get(word, word) for word in recipe.split() if word.startswith("test-")}
