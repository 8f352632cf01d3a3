"""The probe of the fp8 family, on a real engine, and how it weighs what it saw."""

from pathlib import Path
from typing import Any

import pytest
from installed import version_of
from packaging.version import Version
from verify_command import verify

from flashpatch.verify.probes import answers, jobs
from flashpatch.verify.probes.fp8 import probe

LOOK: dict[str, Any] = {
    "tensors": {"w": {"at": [1, 2], "dtype": "float8_e4m3fn"}, "b": {"at": [3, 4], "dtype": "bfloat16"}},
    "kernels": {},
    "spans": None,
}
SEEN = {"precision": {"quantization": "fp8_per_channel"}, "seconds": {"before": 1.0}, "looks": [LOOK] * 2}
SAME, OTHER = [[-1.0, -2.0]], [[-1.0, -3.0]]
SPANS = "version spans"


def exact(proofs: list[dict[str, Any]], count: int) -> None:
    updates = [proof["evidence"] for proof in proofs if "largest difference" in proof["evidence"]]
    assert len(updates) == count and all("largest difference 0 to" in update for update in updates), proofs


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "float8_e4m3fn"),
        pytest.param("int8", "8 CompressedTensorsW8A8Int8/CPUInt8ScaledMM", marks=pytest.mark.full),
        pytest.param("fp8_channel", "float8_e4m3fn", marks=pytest.mark.full),
        pytest.param("bf16", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_on_vllm(tmp_path: Path, name: str, dtype: str) -> None:
    said = verify(name, tmp_path).proven()
    told = [proof["evidence"] for proof in said.proofs if SPANS in proof["what"]]
    newest = version_of("vllm") >= Version("0.32")
    assert told == (["default, flashpatch-1, flashpatch-2, flashpatch-3"] if newest else [])
    assert dtype in said.proofs[0]["evidence"]
    exact(said.proofs, 3)
    assert any(proof["evidence"].endswith("tensors, 3 updates") for proof in said.proofs)
    assert not list(tmp_path.glob("flashpatch-verify-*")), "nothing is left behind"


@pytest.mark.sglang
@pytest.mark.full
def test_on_sglang(tmp_path: Path) -> None:
    import sglang_lab

    said = verify("bf16", tmp_path, sglang_lab.environment(tmp_path), 600).proven()
    exact(said.proofs, 3)


def opened(precision: str, kernels: dict[str, int] | None = None, **tensors: Any) -> Any:
    look = {**LOOK, "kernels": kernels or {}, **tensors}
    return probe._opened({**SEEN, "looks": [look]}, "", precision)


@pytest.mark.parametrize(
    ("kernels", "ok"),
    [({"W8A8Int8/Int8Kernel": 8}, True), ({"W8A8Int8/Int8Kernel": 7, "Unquantized": 1}, False), ({}, False)],
)
def test_int8_is_seen_in_every_kernel(kernels: dict[str, int], ok: bool) -> None:
    assert opened("int8", kernels, tensors={"b": {"at": [3, 4], "dtype": "bfloat16"}}).ok is ok


@pytest.mark.parametrize(("precision", "ok"), [("fp8", True), ("bf16", False)])
def test_the_precision_is_seen_in_the_parameters(precision: str, ok: bool) -> None:
    found = opened(precision)
    assert (found.ok, found.evidence) == (ok, "quantization fp8_per_channel: 1 float8_e4m3fn, 1 bfloat16")


def test_an_engine_that_did_not_open_says_why() -> None:
    found = probe._opened({}, "job ended with status 1: ...Traceback", "fp8")
    assert (found.ok, found.evidence) == (False, "job ended with status 1: ...Traceback")


@pytest.mark.parametrize("other", [{"at": [1, 9]}, {"at": [9, 2]}, None])
def test_a_tensor_that_moved_or_went_is_named(other: Any) -> None:
    later = {**LOOK["tensors"], "w": other}
    looks = [LOOK["tensors"], {name: tensor for name, tensor in later.items() if tensor}]
    found = probe._addresses(looks)
    assert (found.ok, found.evidence) == (False, "1 of 2 moved: w")
    assert probe._addresses([LOOK["tensors"]] * 2).ok and not probe._addresses(looks[:1]).ok


@pytest.mark.parametrize(
    ("second", "ok"),
    [
        ([["flashpatch-1", 0, 8]], True),
        ([["default", 0, 8]], False),
        ([["default", 0, 3], ["flashpatch-1", 3, 8]], False),
        (None, False),
    ],
)
def test_vllms_own_spans_are_a_second_witness(second: Any, ok: bool) -> None:
    [found] = probe._spans([[["default", 0, 8]], second])
    assert found.ok is ok and (ok or "after 1 updates" in found.evidence)
    assert not [*probe._spans([None, None])], "vLLM before 0.32 tells none"


def updates(**found: list[list[float]]) -> list[bool]:
    fresh = {"answers": found.pop("fresh")} if "fresh" in found else {}
    ended = jobs.Outcome({"job": {"answers": found}, "fresh": fresh}, {"job": "", "fresh": ""}, "", 0.0)
    return [proof.ok for proof in probe._judged(ended, "bf16", "reload")][1:]


def test_updates_are_compared_bit_by_bit() -> None:
    good = dict(before=SAME, identity=SAME, perturbation=OTHER, fresh=OTHER, **{"return": SAME})
    nan = float("nan")
    assert updates(**good) == [True, True, True]
    assert updates(**{**good, "identity": [[-1.0, -2.0000000000000004]]}) == [False, True, True]
    same = updates(**{**good, "perturbation": SAME, "fresh": SAME})
    assert same == [True, False, True], "nothing was updated"
    assert updates(**{**good, "perturbation": [[1.0, nan]], "fresh": [[1.0, nan]]}) == [True, False, True]
    assert updates(**{**good, "return": OTHER}) == [True, True, False]
    assert updates(**{**good, "return": [[*SAME[0], 0.0]]}) == [True, True, False]
    assert not answers.equal([[nan]], [[nan]]) and not answers.equal([], SAME)


def test_what_was_not_reached_is_not_ok() -> None:
    assert updates(before=SAME, identity=SAME) == [True, False, False]
    assert updates(before=SAME, identity=SAME, perturbation=OTHER) == [True, False, False], "no fresh engine"
    assert updates() == [False, False, False]
