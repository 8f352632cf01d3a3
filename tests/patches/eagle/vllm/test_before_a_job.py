"""``flashpatch-verify eagle --drafter D --model M`` on real engines: what it says of a drafter that is always right."""

import json
import sys
from pathlib import Path

import machine
import pytest

ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)


def verify(*arguments: object):
    command = [Path(sys.executable).with_name("flashpatch-verify"), "eagle", "--drafter"]
    engine = {**ENGINE, "skip_tokenizer_init": True}
    return machine.run([*map(str, [*command, *arguments]), "--engine", json.dumps(engine)], 400)


@pytest.mark.full
@pytest.mark.vllm(least="0.32")
def test_every_draft_of_an_exact_drafter_counts_and_the_arms_are_told(models: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": [3, 4, 5]}\n{"prompt": [6, 7]}\n')
    given = "--model", models / "chain", "--prompts", tmp_path / "p.jsonl", "--temperature", 0, "--json"
    done = verify(models / "exact", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    for batch in ("1", "8", "64"):
        none, stock, bandit = (found[way][batch] for way in ("none", "stock", "bandit"))
        assert none["tokens/s"] > 0 and none["length"] == 1 and not none["arms"]
        assert stock["length"] > 3.8 and not stock["arms"]
        assert bandit["arms"].keys() <= {"disable", "1_1_2", "3_1_4"} and sum(bandit["arms"].values()) > 5


def test_a_folder_without_a_drafter_is_named(tmp_path: Path) -> None:
    done = verify(tmp_path, "--model", tmp_path)
    assert done.returncode == 2 and f"{tmp_path}/config.json" in done.stderr
