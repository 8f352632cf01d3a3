"""The probe of the fp8 family: on a real engine, and how it weighs what it saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed import version_of
from machine import limit
from packaging.version import Version

from flashpatch.ledger import files
from flashpatch.verify.probes.fp8 import vllm_probe

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
SEEN = {
    "quantization": "fp8_per_channel",
    "seconds": {"before": 1.0},
    "pids": {"driver": 10, "engine-core": 11, "worker": 12},
    "looks": [{"w": {"at": [1, 2], "dtype": "float8_e4m3fn"}, "b": {"at": [3, 4], "dtype": "bfloat16"}}] * 2,
}
ENDED = {"job": "", "fresh": ""}
SPANS = "version spans"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "float8_e4m3fn"),
        pytest.param(
            "int8", "8 CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel", marks=pytest.mark.full
        ),
        pytest.param("fp8_channel", "float8_e4m3fn", marks=pytest.mark.full),
        pytest.param("bf16", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_on_a_real_engine(tmp_path, name, dtype):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, name, "--json"],
        env={**inherited, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [family] = json.loads(done.stdout)["families"]
    opened, *updates, addresses, written, rows = [one for one in family["proofs"] if SPANS not in one["what"]]
    told = [one["evidence"] for one in family["proofs"] if SPANS in one["what"]]
    newest = version_of("vllm") >= Version("0.32")
    assert told == (["default, flashpatch-1, flashpatch-2, flashpatch-3"] if newest else [])
    assert dtype in opened["evidence"]
    assert all("largest difference 0 to" in update["evidence"] for update in updates) and len(updates) == 3
    assert addresses["evidence"].endswith("tensors, 3 updates")
    assert not list(tmp_path.glob("flashpatch-verify-*")), "nothing is left behind"


@pytest.mark.parametrize(
    ("kernels", "ok"),
    [({"W8A8Int8/Int8Kernel": 8}, True), ({"W8A8Int8/Int8Kernel": 7, "Unquantized": 1}, False), ({}, False)],
)
def test_int8_is_seen_in_every_kernel(kernels, ok):
    looks = [{"b": {"at": [3, 4], "dtype": "bfloat16"}}]
    assert vllm_probe._opened({**SEEN, "looks": looks, "kernels": kernels}, ENDED, "int8").ok is ok


@pytest.mark.parametrize(("precision", "ok"), [("fp8", True), ("bf16", False)])
def test_the_precision_is_seen_in_the_parameters(precision, ok):
    found = vllm_probe._opened(SEEN, ENDED, precision)
    assert found.ok is ok
    assert found.evidence == "quantization fp8_per_channel: 1 float8_e4m3fn, 1 bfloat16"


def test_an_engine_that_did_not_open_says_why():
    assert (
        vllm_probe._opened({"failed": {"step": "before", "error": "E: x"}}, ENDED, "fp8").evidence == "E: x"
    )
    ended = {"job": "job ended with status 1: ...Traceback"}
    assert vllm_probe._opened({}, ended, "fp8").evidence == "job ended with status 1: ...Traceback"


@pytest.mark.parametrize("other", [{"at": [1, 9]}, {"at": [9, 2]}, None])
def test_a_tensor_that_moved_or_went_is_named(other):
    later = {**SEEN["looks"][0], "w": other}
    looks = [SEEN["looks"][0], {name: tensor for name, tensor in later.items() if tensor}]
    found = vllm_probe._addresses({"looks": looks})
    assert (found.ok, found.evidence) == (False, "1 of 2 moved: w")
    assert vllm_probe._addresses(SEEN).ok


@pytest.mark.parametrize(
    ("second", "ok"),
    [
        ([["flashpatch-1", 0, 8]], True),
        ([["default", 0, 8]], False),
        ([["default", 0, 3], ["flashpatch-1", 3, 8]], False),
        (None, False),
    ],
)
def test_vllms_own_spans_are_a_second_witness(second, ok):
    [found] = vllm_probe._spans({"spans": [[["default", 0, 8]], second]})
    assert found.ok is ok and (ok or "after 1 updates" in found.evidence)
    assert not [*vllm_probe._spans({"spans": [None, None]})], "vLLM before 0.32 tells none"


@pytest.fixture
def answers(tmp_path):
    """Writes answers as the two processes do: name to the values in it."""
    numpy = pytest.importorskip("numpy")

    def answers(**values):
        for name, value in values.items():
            numpy.save(tmp_path / f"{name}.npy", numpy.array([value], dtype=numpy.float32))
        return [found.ok for found in vllm_probe._updates(tmp_path, SEEN, {"job": "died", "fresh": "died"})]

    return answers


def test_updates_are_compared_bit_by_bit(answers):
    nan, a, b = float("nan"), [1.0, 2.0], [1.0, 3.0]
    good = dict(before=a, identity=a, perturbation=b, **{"return": a}, fresh=b)
    assert answers(**good) == [True, True, True]
    assert answers(**{**good, "identity": [1.0, 2.0000002]}) == [False, True, True]
    assert answers(**{**good, "perturbation": a, "fresh": a}) == [True, False, True], "nothing was updated"
    assert answers(**{**good, "perturbation": [1.0, nan], "fresh": [1.0, nan]}) == [True, False, True]
    assert answers(**{**good, "return": b}) == [True, True, False]
    assert answers(**{**good, "return": [*a, 0.0]}) == [True, True, False]


def test_what_was_not_reached_is_not_ok(answers):
    assert answers(before=[1.0], identity=[1.0]) == [True, False, False]


class Test_the_ledger:
    CALLED = {
        "driver": ["create_engine_config", "process_outputs", "core_engine_proc_manager_init"],
        "engine-core": ["engine_core_init", "collective_rpc", "step_with_batch_queue"],
        "worker": [
            "initialize_model",
            "worker_load_model",
            "worker_execute_model",
            "model_runner_execute_model",
            "process_weights_after_loading",
            "initialize_layerwise_reload",
            "finalize_layerwise_reload",
        ],
    }

    @pytest.fixture
    def weigh(self, tmp_path: Path, monkeypatch):
        """The verdict on a ledger with these calls per role."""

        def weigh(called=self.CALLED, run="nonce", roles=None):
            monkeypatch.setenv("FLASHPATCH_LEDGER", str(tmp_path))
            monkeypatch.setenv("FLASHPATCH", "fp8")
            for role, names in called.items():
                patches = {f"fp8.vllm.{name}": {"state": "live", "calls": 2} for name in names}
                row = dict(
                    kind="row",
                    run=run,
                    host="h",
                    pid=SEEN["pids"][role],
                    start="1",
                    ppid=1,
                    argv0="",
                    roles=[role] if roles is None else roles,
                    rank={},
                    versions={},
                    patches=patches,
                    notes={},
                    error=None,
                    written="",
                )
                files.write(tmp_path / run / files.file_name("row", "h", row["pid"], "1"), row)
            return vllm_probe._written(SEEN, "nonce")

        return weigh

    def test_complete(self, weigh):
        assert weigh().ok

    def test_a_process_without_a_row(self, weigh):
        found = weigh({role: names for role, names in self.CALLED.items() if role != "worker"})
        assert (found.ok, found.evidence) == (False, "worker 12 wrote no row under the nonce")

    def test_rows_of_another_run_do_not_count(self, weigh):
        assert not weigh(run="yesterday").ok

    def test_a_patch_that_was_never_called(self, weigh):
        found = weigh({**self.CALLED, "engine-core": ["engine_core_init", "collective_rpc"]})
        assert (
            found.evidence
            == "fp8.vllm.engine_core_step or fp8.vllm.step_with_batch_queue was never called in engine-core 11"
        )

    def test_a_process_that_does_not_know_its_role(self, weigh):
        assert "process 12 does not know that it is the worker" in weigh(roles=[]).evidence
