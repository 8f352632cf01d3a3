"""On published wheels of verl before 0.9 the family refuses itself by name, on the legacy actor of 0.7.1 too."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")


import cpu_lab
from machine import limit

pytestmark = [pytest.mark.verl, pytest.mark.full]

CONFIG = "verl.utils.config:validate_config"
WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker.init_model"
LEGACY = "verl.workers.actor.dp_actor:DataParallelPPOActor"
CALL = """
import importlib, json, sys

said = {}
for target in sys.argv[1:]:
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    try:
        found(None, None)
    except Exception as error:
        said[target] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.fixture(scope="module", params=["0.7.1", "0.8.0"])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A version of verl, and the folder of its unpacked wheel, from PyPI or where PIP_FIND_LINKS says."""
    folder = tmp_path_factory.mktemp("older")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    done = subprocess.run(
        [*pip, f"verl=={request.param}"], capture_output=True, text=True, timeout=limit(120)
    )
    if done.returncode:
        pytest.skip(f"pip cannot get the wheel of verl {request.param}: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return request.param, folder / "site"


def calls(site: Path, folder: Path, *targets: str, **extra: str) -> dict[str, str]:
    """What each target raises when it is called with nothing of use, in a process that imports verl from ``site``."""
    env = cpu_lab.environment(folder, PYTHONPATH=str(site), **extra)
    command = [sys.executable, "-c", CALL, *targets]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=limit(200))
    assert done.returncode == 0, cpu_lab.tail(done)
    return json.loads(done.stdout.splitlines()[-1])


def test_driver_and_actor_refuse_by_name(older, tmp_path):
    version, site = older
    targets = [CONFIG, WORKER, *([LEGACY] if version == "0.7.1" else [])]
    stock = calls(site, tmp_path, *targets)
    assert set(stock) == set(targets) and not any("flashpatch" in said for said in stock.values())
    for said in calls(site, tmp_path, *targets, FLASHPATCH="flowrl").values():
        assert said.startswith("PatchError: [flashpatch: flowrl.verl.") and f"verl {version}]" in said
        assert f"verl {version} does not meet verl>=0.9" in said and "switch 'flowrl' off" in said
