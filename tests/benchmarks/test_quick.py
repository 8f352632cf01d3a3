"""Each benchmark runs with ``--quick``, on a tiny random model if it needs one, and its last line says what it measures."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from installed import version_of
from machine import limit

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
EXAMPLE = FOLDER.parent / "examples" / "verl_cpu"
NUMBER = r"[+-]?[\d.,]+"

LAST = {
    "bandit": rf"thompson +x{NUMBER} +x{NUMBER}",
    "drained": rf"256( +{NUMBER}){{3}}",
    "delta": rf"verl is not installed|10% changed .* {NUMBER}",
    "ledger": r"\d+ calls for each of 200 processes, aim \d+: met",
    "router": rf"256 requests, independent, equal: {NUMBER}, {NUMBER} us",
    "startup": r"verl is not installed|verl, in hooks, with kept verdicts: .*: (met|missed)",
    "transfer": rf"verl is not installed|a sync takes {NUMBER} to {NUMBER} times .*",
}
"""What the last line of each is that needs no engine."""


HELPERS = {"quick", "longtail", "bandit_fastrl", "bandit_traces", "router_traces", "turns", "random_models"}
COUNTED = pytest.mark.skipif(
    version_of("vllm").release[:2] != (0, 24), reason="was counted on vLLM 0.24 alone"
)
WITH_ENGINE = {
    "drained_job": (pytest.mark.verl, rf"training steps {NUMBER}, seconds {NUMBER}, per token {NUMBER}"),
    "felt": ([pytest.mark.cuda, COUNTED], r"0 aims missed"),
    "history": (pytest.mark.vllm, rf"1 moved, ngram +\d+ +{NUMBER} \({NUMBER} to {NUMBER}\) +{NUMBER} +\d+%"),
    "reload": (pytest.mark.vllm(least="0.32"), rf"0 aims missed|.*: .* {NUMBER}, aim {NUMBER}"),
    "reward": (pytest.mark.verl, r"bf16 all +1( +[-+]?\d[\d.e+-]*){8}"),
    "rollout": (pytest.mark.vllm, r"int8 is faster than stock bf16 at batches .*"),
}
"""What those need that need an engine or verl, and their last lines. Stock vLLM 0.24 opens no fp8 on a CPU, which `reload` compares."""
OF_A_WORLD = {"drained_job", "history", "reward", "rollout"}
"""These take a folder with a model and prompts."""


def test_each_benchmark_is_known() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts <= HELPERS | set(WITH_ENGINE) | set(LAST)


def last_line(name: str, *arguments: str) -> str:
    """Run a benchmark quickly; return the last line that it prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--quick", *arguments],
        env=clean,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()][-1]


@pytest.mark.full
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("name", sorted(name for name in LAST if (FOLDER / f"{name}.py").exists()))
def test_one_that_needs_no_engine(name: str) -> None:
    line = last_line(name)
    assert re.fullmatch(LAST[name], line), line


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("benchmarks") / "world"
    subprocess.run([sys.executable, EXAMPLE / "make.py", folder], check=True, capture_output=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, (mark, _) in WITH_ENGINE.items()])
def test_one_that_needs_an_engine(name: str, request: pytest.FixtureRequest) -> None:
    arguments = [str(request.getfixturevalue("world"))] if name in OF_A_WORLD else []
    line = last_line(name, *arguments)
    assert re.fullmatch(WITH_ENGINE[name][1], line), line
