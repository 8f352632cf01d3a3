"""Which tokens are compared is said; a model that cannot be read is said too."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from vllm_lab import models

from flashpatch import engine
from flashpatch.settings.selections import NOTHING, Choice, Selection
from flashpatch.verify.exact import command
from flashpatch.verify.exact.certificate import Certificate
from flashpatch.verify.exact.command import RANDOM_TOKENS, certify, tables, tokens
from flashpatch.verify.exact.verl_job import Job

WORDS = [chr(code) for code in range(97, 123)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its tokenizer knows 26 letters, a word each."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    path = models.checkpoint(tmp_path, "llama")
    known = {word: number for number, word in enumerate([*WORDS, "?"])}
    tokenizer = Tokenizer(kinds.WordLevel(known, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def test_a_prompt_that_is_compared_is_counted(model: Path) -> None:
    ids, said = tokens(str(model), " ".join(WORDS))
    assert ids == [*range(26)] and said == "26 tokens of the prompt"


@pytest.mark.parametrize(
    ("text", "window", "more"), [("a b c", None, RANDOM_TOKENS), (" ".join(WORDS), 40, 30)]
)
def test_random_tokens_follow_a_short_prompt(model: Path, text: str, window: int | None, more: int) -> None:
    file = model / "config.json"
    changes = {"sliding_window": window, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    ids, said = tokens(str(model), text)
    given = len(text.split())
    assert ids[:given] == [*range(given)] and len(ids) == given + more
    assert said == f"{given} tokens of the prompt and {more} random ones"


def test_no_tokenizer_is_needed(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    ids, said = tokens(str(model), "text")
    assert len(ids) == RANDOM_TOKENS
    assert said.startswith("0 tokens of the prompt and 48 random ones (no tokenizer: ")


def test_what_was_compared_is_printed() -> None:
    told = tables(Certificate([], prompt="26 tokens", not_compared=("steps",), left_out=("drafts",)))
    assert told[0].notes == ["compared on 26 tokens", "not compared: steps", "left out: drafts"]


def test_a_model_that_cannot_be_read_is_no_traceback(monkeypatch, model: Path) -> None:
    monkeypatch.setattr(command.jobs, "engine_here", lambda kind="": "vllm")
    (model / "config.json").write_text('{"model_type": "nonesuch"}')
    problem = certify(str(model)).problem
    assert problem.startswith("cannot compare here: ") and "nonesuch" in problem
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no folder mistyped, and the Hub: .* Give the folder"):
        certify("mistyped")


@pytest.mark.parametrize(("rank", "other"), [(None, "int8"), ("1", "fp8 fp8_per_tensor")])
def test_the_other_precisions_of_a_fleet_are_left_out(monkeypatch, rank: str | None, other: str) -> None:
    fleet = [{"precision": "fp8", "scheme": "fp8_per_tensor"}, {"precision": "int8"}] * 2
    monkeypatch.setattr(engine.manager, "selection", Selection({"fp8": Choice("fp8", {"fleet": fleet})}))
    monkeypatch.setattr(command, "certify", lambda *arguments: Certificate([]))
    if rank:
        monkeypatch.setenv("VERL_REPLICA_RANK", rank)
    options = command._parser().parse_args(["model", "--seconds=0"])
    (said,) = command.of_job(Job("model", {}), options, {}).left_out
    assert said.startswith(f"fp8.fleet's replicas in {other} (one in ")
    monkeypatch.setattr(engine.manager, "selection", NOTHING)
    assert not command.of_job(Job("model", {}), options, {}).left_out
