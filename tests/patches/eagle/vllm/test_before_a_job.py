"""``flashpatch-verify eagle --drafter D --model M`` on real engines: what it says of a drafter that is always right."""

import json
import sys
from pathlib import Path

import machine
import pytest

pytestmark = [pytest.mark.vllm(least="0.32"), pytest.mark.full]

ENGINE = dict(dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20)


def verify(*arguments: str | Path):
    command = [Path(sys.executable).with_name("flashpatch-verify"), "eagle", *arguments]
    return machine.run([*command, "--engine", json.dumps(ENGINE)], 400)


def test_every_draft_of_an_exact_drafter_counts_and_the_bandit_says_what_it_took(models: Path) -> None:
    done = verify("--drafter", models / "exact", "--model", models / "chain", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["trained"] == ""
    for batch in ("1", "8", "64"):
        assert not found["none"][batch]["counts"] and found["none"][batch]["rate"] > 0
        counts = found["fixed"][batch]["counts"]
        drafts = counts["vllm:spec_decode_num_drafts"]
        assert counts["vllm:spec_decode_num_accepted_tokens"] > 2.8 * drafts > 0
        took = {arm: count for arm, count in found["bandit"][batch]["counts"].items() if ":" not in arm}
        assert took.keys() <= {"disable", "1_1_2", "3_1_4"} and sum(took.values()) > 10, took


def test_without_its_target_a_drafter_says_nothing(models: Path) -> None:
    done = verify("--drafter", models / "exact")
    assert done.returncode == 2 and "--drafter DIR --model DIR" in done.stderr
