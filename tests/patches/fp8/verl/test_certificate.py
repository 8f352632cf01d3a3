"""A job of verl compares its engine with its model before it starts, and by option does not start if they differ."""

import json
import time
from pathlib import Path

import pytest
from machine import limit
from verl_job import live, metrics, train

from flashpatch.errors import PatchError
from flashpatch.ledger import files
from flashpatch.patches.fp8.verl import verl_config

OTHER_NORM = "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rms_norm_eps=0.1"


def learn(world: Path, folder: Path, act: str, *extra: str):
    folder.mkdir(exist_ok=True)
    return train(world, folder, *extra, FLASHPATCH="cpu,bf16", config=f'[fp8]\ncertificate = "{act}"\n')


def noted(folder: Path) -> dict:
    rows = [json.loads(path.read_text()) for path in (folder / "ledger").glob("*/row*.json")]
    (found,) = (row["notes"]["certificate"] for row in rows if "certificate" in row.get("notes", {}))
    return found


@pytest.mark.verl
def test_a_job_whose_engine_differs_does_not_start(world, tmp_path) -> None:
    done = learn(world, tmp_path, "stop", OTHER_NORM)
    assert done.returncode != 0 and not metrics(done.stdout, "training/global_step")
    assert "first differs: model.layers.0.input_layernorm" in done.stdout
    assert "certificate='warn'" in done.stdout and "Started a local Ray instance" not in done.stdout
    assert noted(tmp_path)["verdict"] == "first differs: model.layers.0.input_layernorm"


@pytest.mark.verl
@pytest.mark.full
def test_a_job_prints_its_certificate_and_trains(world, tmp_path) -> None:
    done = learn(world, tmp_path, "stop")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "engine and trainer agree to rounding" in done.stdout
    assert metrics(done.stdout, "training/global_step") == [1, 2]
    assert noted(tmp_path)["ok"]
    live(tmp_path)  # and the certificate's own engine is no evidence of the job's


@pytest.mark.verl
@pytest.mark.full
@pytest.mark.parametrize(
    ("rollout", "said"),
    [({"name": "trtllm"}, "rollout.name=trtllm"), ({"name": "vllm"}, "cannot compare here: ")],
)
def test_what_cannot_be_compared_warns_or_stops(rollout, said, caplog) -> None:
    agree, found = verl_config.certificate({"rollout": rollout, "model": {"path": "/nowhere"}}, 60)
    assert not agree and said in found
    verl_config.judge(agree, found, "warn")
    assert said in caplog.text
    with pytest.raises(PatchError, match="certificate='warn'"):
        verl_config.judge(agree, found, "stop")


@pytest.mark.timeout(limit(60))
@pytest.mark.parametrize("ends", [True, False])
def test_what_an_engine_leaves_behind_is_not_waited_for(monkeypatch, tmp_path, ends) -> None:
    left = tmp_path / "left"
    command = f"""if True:
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(left)!r}, "w").write(str(child.pid))
        print("late: not done within 1 seconds", flush=True)
        {"os._exit(1)" if ends else "time.sleep(600)"}"""
    monkeypatch.setattr(verl_config, "_COMMAND", command)
    monkeypatch.setattr(verl_config, "_GRACE", 8.0)
    agree, said = verl_config.certificate({}, 1.0)
    assert not agree and said.startswith("late: not done" if ends else ("late", "cannot compare here"))
    while left.exists() and files.process_start(int(left.read_text())) is not None:
        time.sleep(0.05)
