"""What is switched in which engine, and what the command says of an engine that cannot be looked into."""

import json
from argparse import Namespace

import pytest

from flashpatch.verify.exact import causes, command
from flashpatch.verify.exact.certificate import Certificate

ALWAYS = ["chunked prefill", "prefix cache", "kernels"]
SHOW = "import json, sys; print(json.dumps(dict(problem='', kl=0.5, said=sys.argv)))"


def switched(quantization: str = "", **engine: object) -> list[str]:
    return [switch.name for switch in causes.switches(engine, quantization)]


def test_what_an_engine_has_is_switched(monkeypatch) -> None:
    monkeypatch.setenv("FLASHPATCH", "cpu,int8")
    assert switched() == ["dtype", "head", *ALWAYS]
    assert switched(dtype="float32") == ALWAYS
    found = switched(max_num_batched_tokens=16, enforce_eager=False)
    assert found == ["dtype", "head", "prefix cache"]
    weights, *others = causes.switches({}, "int8")
    assert weights.variables == {"FLASHPATCH": "cpu,bf16"}
    assert [one.name for one in others] == ["head", *ALWAYS]
    monkeypatch.setenv("FLASHPATCH", "cpu")
    assert switched("fp8") == ["head", *ALWAYS]  # the checkpoint's own
    assert next(causes.switches({"quantization": "fp8"}, "fp8")).engine == {"quantization": None}


def test_what_the_model_overrides_stays() -> None:
    (head,) = [one for one in causes.switches({"hf_overrides": {"a": 1}}, "") if one.name == "head"]
    assert head.engine == {"hf_overrides": {"a": 1, "head_dtype": "float32"}}


def test_ranks_are_one(monkeypatch) -> None:
    monkeypatch.setenv("FLASHPATCH", "")
    assert switched(tensor_parallel_size=2) == ["dtype", "head", "ranks", *ALWAYS]
    (one,) = [each for each in causes.switches({"tensor_parallel_size": 2}, "") if each.name == "ranks"]
    assert one.engine == {"tensor_parallel_size": 1}


def measured(code: str, monkeypatch) -> tuple[causes.Cause, ...]:
    monkeypatch.setattr(causes, "COMMAND", code)
    options = Namespace(prompt="of all", seconds=5.0)
    return causes.measured("policy", {"dtype": "float32"}, Certificate([], kl=2.0), options)


def test_each_is_asked_about_the_same_prompt_and_has_its_share(monkeypatch, tmp_path) -> None:
    seen = tmp_path / "seen"
    found = measured(f"{SHOW}; open({str(seen)!r}, 'a').write(json.dumps(sys.argv) + '\\n')", monkeypatch)
    assert [(one.kl, one.share, one.problem) for one in found] == [(0.5, 0.75, "")] * len(ALWAYS)
    said = [json.loads(line) for line in seen.read_text().splitlines()]
    assert all({"--prompt=of all", "--seconds=5.0", "policy"} <= set(line) for line in said)
    assert [line for line in said if '"read": "cached"' in line[-1]] == [said[1]]


def test_an_adapter_is_merged(monkeypatch, tmp_path) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setattr(causes, "COMMAND", f"{SHOW}; open({str(seen)!r}, 'a').write(sys.argv[-1] + '\\n')")
    options = Namespace(prompt="", seconds=5.0)
    served = {"model": "base", "adapter": "folder", "dtype": "float32"}
    first, *_ = causes.measured("policy", served, Certificate([], kl=2.0), options)
    assert (first.name, first.to, first.share) == ("adapter", "merged into the base", 0.75)
    engine, *others = [json.loads(line) for line in seen.read_text().splitlines()]
    assert engine == {"model": "policy", "adapter": "", "dtype": "float32"}
    assert all(one["adapter"] == "folder" for one in others)


@pytest.mark.parametrize(
    ("share", "part"), [(None, ""), (0.341, "34%"), (-0.001, "0%"), (-0.5, "-50%"), (-174.3, "gap x 175")]
)
def test_a_share_is_printed_as_a_percentage_or_as_growth(share, part: str) -> None:
    assert causes.Cause("head", "float32", 1.0, share).part == part


def test_one_that_fails_says_why_and_has_no_share(monkeypatch) -> None:
    (first, *_) = measured("raise SystemExit('no room')", monkeypatch)
    assert (first.kl, first.share, first.problem) == (None, None, "cannot compare here: no room")
    shown = command.tables(Certificate([], kl=2.0, causes=(first,)))[-1]
    assert shown.rows[1] == ("chunked prefill", "steps of 16 tokens", "", "")
    assert shown.notes == ["chunked prefill: cannot compare here: no room"]


@pytest.mark.parametrize("kind", ["pipeline", "data", "prefill_context", "decode_context"])
def test_an_engine_in_other_processes_is_refused_by_name(kind: str) -> None:
    pytest.importorskip("torch")
    from flashpatch.verify.exact import engine

    assert engine.refusal({f"{kind}_parallel_size": 2}).startswith(f"{kind}_parallel_size=2, and only")
    assert not engine.refusal({f"{kind}_parallel_size": 1, "tensor_parallel_size": 2})


@pytest.mark.parametrize(("given", "wanted"), [((), "vllm or sglang"), (("--rollout=sglang",), "sglang")])
def test_where_no_engine_is_installed_it_says_so(given, wanted: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command.jobs, "find_spec", lambda name: None)
    assert command.main(["policy", *given]) == command.DIFFER
    assert f"cannot compare here: {wanted} is not installed" in capsys.readouterr().out


def test_a_folder_that_holds_no_checkpoint_is_named(tmp_path, capsys) -> None:
    for model, wrong in (tmp_path / "absent", "there is no folder {}"), (tmp_path, "{} has no config.json"):
        assert command.main([str(model)]) == command.USAGE
        said = f"flashpatch-verify exact: {wrong.format(model)}. Give the folder of a checkpoint"
        assert capsys.readouterr().err.startswith(said)
