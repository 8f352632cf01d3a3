"""Weights of a quantized SGLang engine updated while it runs: as a fresh engine on them, to the last bit.

Two engines run side by side, one opened on A and brought to B, one opened on B and brought to A. What the one says
at first is what the other must say after its update."""

from pathlib import Path
from typing import Any

import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang

AMX = {"STANDIN_AMX": "1"}  # SGLang quantizes on no other CPU
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def there_and_back(folder: Path, a: str, b: str, hows: tuple[Any, Any], name: str) -> list[lab.Seen]:
    """Both engines, each through both updates: to the other model and back."""

    def steps(here: str, there: str) -> list[Any]:
        to, back = ([how[0], dict(source=place, **how[1])] for how, place in zip(hows, (there, here)))
        return ["answers", to, "answers", back, "answers"]

    jobs = [
        dict(model=here, steps=steps(here, there), flashpatch=name, env=AMX)
        for here, there in ((a, b), (b, a))
    ]
    seen = lab.together(folder, *jobs)
    for one in seen:
        assert one.done, str(one)
    return seen


def check(seen: list[lab.Seen], model: str) -> None:
    first, second = (one.steps for one in seen)
    assert f"type={model}" in seen[0].log, "SGLang took another implementation"
    assert first[0] != second[0], "A and B answer alike: nothing would be shown"
    for own, other in ((first, second), (second, first)):
        assert own[2] == other[0], "after the update it answers otherwise than a fresh engine"
        assert own[4] == own[0], "after the way back it answers otherwise than before"
        for step in (own[1], own[3]):
            answers = step if isinstance(step[0], list) else [step]
            assert all(done for done, _ in answers), answers


HOWS = {
    "split-flattened": (("update", dict(how="split")), ("update", dict(how="flattened"))),
    "single-whole": (("update", dict(how="single")), ("update", dict(how="whole"))),
    "disk-distributed": (("disk", {}), ("distributed", {})),
}

_FULL = pytest.mark.full
BF16, INT8 = lab.checkpoint, lab.int8_checkpoint
#: family, ways, names that are on, the checkpoints, and what the worker notes as its quantization
CELLS = [
    ("llama", "split-flattened", "fp8", BF16, "fp8"),
    ("qwen2", "disk-distributed", "fp8", BF16, "fp8"),
    ("qwen2", "split-flattened", "int8", BF16, "w8a8_int8"),  # rounded on the way
    *(
        pytest.param(family, how, "fp8", BF16, "fp8", marks=_FULL)
        for family, how in (
            ("qwen3", "single-whole"),
            ("llama", "disk-distributed"),
            ("qwen2", "split-flattened"),
            ("qwen3", "split-flattened"),
            ("qwen2-tied", "split-flattened"),
        )
    ),
    *(pytest.param(f, "split-flattened", "bf16", BF16, None, marks=_FULL) for f in ("qwen2", "llama")),
    *(
        pytest.param(f, "split-flattened", "fp8", INT8, None, marks=_FULL)
        for f in ("qwen2", "llama", "qwen3")
    ),
]


@pytest.mark.parametrize(("family", "how", "name", "checkpoint", "noted"), CELLS)
def test_there_and_back(
    family: str, how: str, name: str, checkpoint: Any, noted: str | None, models: Path, tmp_path: Path
) -> None:
    a, b = (checkpoint(models, family, seed) for seed in (0, 1))
    seen = there_and_back(tmp_path, a, b, HOWS[how], name)
    check(seen, CLASSES[family.partition("-")[0]])
    if noted:  # and not one linear layer without it, or the engine is refused
        [worker] = [row for row in lab.rows(seen[0]) if "worker" in row["roles"]]
        assert worker["notes"]["quantization"] == noted


@pytest.mark.full
def test_int8_from_the_trainers_bf16(models: Path, tmp_path: Path) -> None:
    """The engine holds int8; the trainer sends bf16, which is rounded on the way, shard by shard."""
    a, b = (lab.int8_checkpoint(models, "qwen2", seed) for seed in (0, 1))
    wide = lab.checkpoint(models, "qwen2", 1)
    steps = ["answers", ["update", dict(source=wide, how="split")], "answers"]
    jobs = [dict(model=a, steps=steps), dict(model=b, steps=["answers"])]
    seen = lab.together(tmp_path, *(dict(job, flashpatch="fp8", env=AMX) for job in jobs))
    assert all(one.done for one in seen), str(seen[0])
    updated, fresh = seen[0].steps, seen[1].steps
    assert all(done for done, _ in updated[1]), updated[1]
    assert updated[2] == fresh[0] != updated[0]


def test_a_head_of_a_tied_model(models: Path, tmp_path: Path) -> None:
    """One that equals the embedding is no matter; another one, which SGLang would drop, is refused."""
    from safetensors.torch import load_file, save_file

    a, b = (lab.checkpoint(models, "qwen2-tied", seed) for seed in (0, 1))
    tensors = load_file(Path(b) / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    sources = {"equal": embedding.clone(), "other": embedding.flip(0).contiguous()}
    for name, head in sources.items():
        (tmp_path / name).mkdir()
        save_file({**tensors, "lm_head.weight": head}, tmp_path / name / "model.safetensors")
    steps: list[Any] = ["answers"]
    for name in sources:
        steps += [["update", dict(source=str(tmp_path / name), how="split")], "answers"]
    updated, fresh = lab.together(
        tmp_path,
        dict(model=a, steps=steps[:-1], flashpatch="bf16", env=AMX),
        dict(model=b, steps=["answers"], flashpatch="bf16", env=AMX),
    )
    assert updated.done and fresh.done, str(updated)
    assert all(done for done, _ in updated.steps[1]), updated.steps[1]
    assert updated.steps[2] == fresh.steps[0]
    assert "lm_head.weight and model.embed_tokens.weight have different values" in str(updated.steps[3])


@pytest.mark.skipif(lab.OLD, reason="this SGLang has no sessions")
def test_an_update_by_name(models: Path, tmp_path: Path) -> None:
    """`flashpatch.update`: whole, given up by its sender after everything has come, incomplete, whole."""
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    steps: list[Any] = [["within", dict(source=b)], "answers"]
    steps += [["within", dict(source=a, dies=True)], "refused"]
    steps += [
        ["within", dict(source=a, without="layers.1.mlp.up_proj")],
        ["within", dict(source=b)],
        "answers",
    ]
    seen, other = lab.together(
        tmp_path,
        dict(model=a, steps=steps, flashpatch="bf16", env=AMX),
        dict(model=b, steps=["answers"], env=AMX),
    )
    assert seen.done and other.done, str(seen)
    whole, answers, died, refused, cut, again, last = seen.steps
    assert whole == again == "" and answers == last == other.steps[0]
    assert "the sender died" in died and "given up" in refused
    assert "PatchError" in cut and "did not come" in cut


def test_what_is_wrong_is_an_answer(models: Path, tmp_path: Path) -> None:
    """An incomplete update, bad values, doors that lead past the transaction: refused by name, and the engine lives."""
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    fresh = dict(model=b, steps=["answers"], flashpatch="fp8", env=AMX)
    steps = [
        "answers",  # 0
        ["begin", {}],
        "end",  # 2: nothing was sent
        "answers",
        ["update", dict(source=b, without="layers.1.mlp.up_proj")],  # 4: incomplete
        "refused",
        ["update", dict(source=b, load_format="direct")],  # 6
        ["begin", {}],
        ["bucket", dict(source=b, only="layers.0")],  # 8: an open session
        "refused",
        "end",  # 10
        ["update", dict(source=b, how="split")],
        "answers",  # 12
        "refused",
    ]
    seen, other = lab.together(tmp_path, dict(model=a, steps=steps, flashpatch="fp8", env=AMX), fresh)
    assert seen.done, str(seen)
    got = seen.steps
    assert not got[2][0] and "brought no weights" in got[2][1]
    assert got[3] == got[0]
    assert got[4][-1][0] is False and "model.layers.1.mlp.up_proj.weight" in got[4][-1][1]
    assert f"fp8.{lab.FRAMEWORK}.get_next_batch_to_run" in got[5] and "up_proj" in got[5]
    assert got[6][1][0] is False and "load_format='direct'" in got[6][1][1]
    assert "did not come" in got[9]
    assert got[10][0] is False
    assert all(done for done, _ in got[11]), got[11]
    [notes] = [row["notes"] for row in lab.rows(seen) if "worker" in row["roles"]]
    assert notes["requests_refused"] == 2 and notes["refusing"] == "", "noted, until it served again"
    assert got[12] == other.steps[0] and got[13] == ""


@pytest.mark.full
def test_the_native_loader_keeps_its_models(models: Path, tmp_path: Path) -> None:
    """load_format=flash_rl: FlashPatch stands aside, says so, and SGLang's own update goes on as it does alone."""
    a, b = (lab.checkpoint(models, "qwen2", seed) for seed in (0, 1))
    send = ["loose", dict(source=b, how="whole")] if lab.OLD else ["update", dict(source=b)]
    job = dict(model=a, steps=["answers", send, "answers"], env=AMX)
    job |= dict(quantization="fp8", load_format="flash_rl")
    ours, alone = lab.together(tmp_path, dict(job, flashpatch="fp8"), job)
    assert ours.steps == alone.steps and ours.done == alone.done
    assert "left to SGLang's load_format=flash_rl" in ours.log
    # 0.5.21 ends while it loads, before a row is written; 0.5.12 in a Triton kernel of the update
    if not alone.done:
        assert ("active drivers" if lab.OLD else "_prepare_weights() takes 4") in alone.log
        return
    notes = [row["notes"] for row in lab.rows(ours)]
    assert any(note.get("superseded") for note in notes)


@pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.full)], ids=["forked", "new_interpreters"]
)
def test_what_each_process_did_is_in_the_ledger(models: Path, tmp_path: Path, fresh: bool) -> None:
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    seen = lab.run(
        tmp_path, model=a, steps=["answers", ["update", dict(source=b)]], flashpatch="bf16", fresh=fresh
    )
    assert seen.done, str(seen)
    rows = {role: row for row in lab.rows(seen) for role in row["roles"]}
    assert rows["worker"]["notes"]["policy_version"] == 1
    calls = {id: entry["calls"] for id, entry in rows["engine-core"]["patches"].items()}
    sessions = "restore_weights_before_loading postprocess_weights begin_weight_update end_weight_update"
    for due in (
        "initialize_model",
        "load_model",
        "update_weights_from_tensor",
        "scheduler_init",
        "get_next_batch_to_run",
        *("load_weights_and_postprocess" if lab.OLD else sessions).split(),
    ):
        assert calls[f"fp8.{lab.FRAMEWORK}.{due}"], due
    launched = f"fp8.{lab.FRAMEWORK}.launch_scheduler_processes"
    assert rows["driver"]["patches"][launched]["calls"] == 1


@pytest.mark.skipif(not lab.OLD, reason="from 0.5.21 on SGLang takes no tensors outside of a session")
def test_without_a_session_an_update_ends_with_its_last_tensor(models: Path, tmp_path: Path) -> None:
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    steps = [
        "answers",
        ["bucket", dict(source=b, only="lm_head", version="7")],
        "refused",  # 2
        ["bucket", dict(source=b, without="lm_head")],
        "versions",  # 4
        "answers",
        ["loose", dict(source=a, how="single")],  # 6
        "answers",
        ["bucket", dict(source=b, only="lm_head", version="8")],
        ["disk", dict(source=b)],  # 9: instead of what "8" began
        ["loose", dict(source=a, how="whole")],
        "versions",  # 11
        ["bucket", dict(source=b, only="lm_head", version="9")],
        ["bucket", dict(source=b, load_format="direct", version="10")],  # 13: refused, and "9" goes on
        ["bucket", dict(source=b, without="lm_head")],
        "versions",  # 15
    ]
    seen = lab.run(tmp_path, model=a, steps=steps, flashpatch="int8", env=AMX)
    fresh = lab.run(tmp_path / "fresh", model=b, steps=["answers"], flashpatch="int8", env=AMX)
    assert seen.done and fresh.done, str(seen)
    got = seen.steps
    assert got[1][0] and "waits for more" in got[1][1]
    assert "get_next_batch_to_run" in got[2] and "did not come" in got[2]
    assert got[3][0] and "waits for more" not in got[3][1]
    assert got[4][0] == "7"
    assert got[5] == fresh.steps[0] != got[0]
    assert [done for done, _ in got[6]] == [True] * len(got[6])
    assert got[7] == got[0]
    assert got[9][0] and not got[13][0]
    assert [got[number][0] for number in (11, 15)] == ["7", "9"], got[8:]


def test_the_version_moves_with_the_commit(models: Path, tmp_path: Path) -> None:
    """Under atomic=model the old policy answers until the end, and is stamped as what it is."""
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    steps = [
        ["begin", {}],
        ["bucket", dict(source=b, only="layers.0", version="7")],
        "versions",  # 2
        "end",  # incomplete
        "versions",  # 4
        ["update", dict(source=b, how="split", version="8")],
        "versions",  # 6
        ["begin", {}],
        ["bucket", dict(source=b, only="layers.0", version="9")],
        ["disk", dict(source=a, weight_version="10")],
        "versions",  # 10
        "end",  # of a session whose update another one has replaced
        "versions",  # 12
    ]
    options = {"fp8": dict(atomic="model")}
    seen = lab.run(tmp_path, model=a, steps=steps, flashpatch="fp8", options=options, env=AMX)
    assert seen.done, str(seen)
    assert seen.steps[1][0] and not seen.steps[3][0]
    assert seen.steps[9][0] and not seen.steps[11][0], seen.steps[7:]
    for number, version in (2, "default"), (4, "default"), (6, "8"), (10, "10"), (12, "10"):
        stamped, spans = seen.steps[number]
        assert stamped == version and all(span[0] == version for span in spans), (number, stamped, spans)


@pytest.mark.sglang(least="0.5.19")  # before, answers have no spans
def test_spans_of_a_request_that_an_update_met(models: Path, tmp_path: Path) -> None:
    """SGLang's own account of each token is that of the transaction: the new version begins where the request was retracted."""
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    steps = [["across", dict(source=b, version="7")], "versions", "answers"]
    seen = lab.run(tmp_path, model=a, steps=steps, flashpatch="fp8", env=AMX)
    fresh = lab.run(tmp_path / "fresh", model=b, steps=["answers"], flashpatch="fp8", env=AMX)
    assert seen.done and fresh.done, str(seen)
    met, (stamped, spans), answers = seen.steps
    assert all(done for done, _ in met["answers"]), met["answers"]
    assert 3 <= met["before"] < 64
    assert met["spans"] == [["default", 0, met["before"]], ["7", met["before"], 64]] and met["last"] == "7"
    assert stamped == "7" and {span[0] for span in spans} == {"7"}
    assert answers == fresh.steps[0]
