"""``flashpatch eagle-warmup``: from prompts to a drafter that vLLM speculates with."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import machine
import pytest

pytest.importorskip("torch")

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.vllm import warmup
from flashpatch.patches.eagle.vllm.warmup import read_prompts


def _flashpatch(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from flashpatch.cli import main; sys.exit(main())"]
    whole = [*command, "eagle-warmup", *map(str, arguments)]
    return machine.run(whole, 500, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "prompts", [["a text", "another"], [[1, 2, 3], [4]], [[{"role": "user", "content": "hello"}]]]
)
def test_prompts_are_texts_messages_or_token_ids(tmp_path: Path, prompts: list) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    assert read_prompts(tmp_path / "p.jsonl") == prompts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no prompts"),
        ('{"other": "x"}\n', "KeyError"),
        ("no json\n", "JSONDecodeError"),
        ('{"prompt": []}\n', "prompt 0 is []"),
        ('{"prompt": "x"}\n{"prompt": [1.5]}\n', "prompt 1 is [1.5]"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(PatchError) as raised:
        read_prompts(tmp_path / "p.jsonl")
    assert problem in str(raised.value) and "column prompt" in str(raised.value)


def test_wrong_usage_is_named(tmp_path: Path) -> None:
    done = _flashpatch(tmp_path, tmp_path / "p.jsonl", "--out", tmp_path / "out")
    assert done.returncode == 2 and "has no config.json" in done.stderr
    done = _flashpatch(tmp_path, tmp_path / "p.jsonl", "--out", tmp_path / "out", "--seconds", "nan")
    assert done.returncode == 2 and "--seconds must be positive" in done.stderr
    (tmp_path / "out" / "drafter").mkdir(parents=True)
    done = _flashpatch(tmp_path, tmp_path / "p.jsonl", "--out", tmp_path / "out")
    assert done.returncode == 2 and "exists; name another --out" in done.stderr


def test_a_drafter_comes_to_its_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import drafter_lab
    from transformers import AutoModelForCausalLM

    model, out = drafter_lab.save_target(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "p.jsonl").write_text('{"prompt": "a text"}')

    def answer(model: Path, _: object, samples: Path, *__: object) -> int:
        drafter_lab.fill(samples, drafter_lab.capture(AutoModelForCausalLM.from_pretrained(model), 2))
        return 2

    monkeypatch.setattr(warmup, "answer", answer)
    monkeypatch.setattr(shutil, "copyfile", lambda *_, **__: pytest.fail("a copy may be interrupted"))
    given = dict(model=model, data=tmp_path / "p.jsonl", out=out, seconds=2.0, engine="vllm", vllm={})
    assert warmup.run(argparse.Namespace(**given, json=True)) == 0
    assert {"config.json", "model.safetensors"} <= set(os.listdir(out / "drafter"))


@pytest.mark.full
@pytest.mark.vllm
def test_a_first_drafter_is_accepted_more_often_than_one_from_scratch(tmp_path: Path, models: Path, job):
    """A chain target: its next token depends on the last one only, which a drafter learns in seconds."""
    from flashpatch.verify.probes.eagle import tiny

    draw = random.Random(0)
    rows = [{"prompt": [draw.randrange(3, 32) for _ in range(12)]} for _ in range(64)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {name: value for name, value in tiny.engine_arguments(models / "chain").items() if name != "model"}
    arguments = (
        models / "chain",
        tmp_path / "p.jsonl",
        *("--out", tmp_path / "out", "--seconds", 40, "--vllm", json.dumps(more), "--json"),
    )
    done = _flashpatch(*arguments, **tiny.ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.rindex("\n{") + 1 :])
    assert found["samples"] >= 64 and found["steps"] > 20
    assert (tmp_path / "out" / "drafter" / "config.json").exists()
    trained, _ = job("acceptance", DRAFTER=found["drafter"])
    noise, _ = job("acceptance", DRAFTER=str(models / "noise"))
    assert trained["length"] > noise["length"] + 0.5
