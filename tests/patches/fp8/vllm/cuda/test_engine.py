"""Whole engines on vLLM's CUDA branch: after an update, captured graphs included, an engine answers as a fresh one does.

What the fake device shows and what not: tests/support/fake_cuda/README.md."""

from importlib.util import find_spec

import pytest
from cuda_lab import mutants
from cuda_lab.compare import differing
from cuda_lab.lane import NEEDS_DEVICE, Run
from installed import version_of
from packaging.version import Version

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]

# By the process that runs them: capability, variables, scenarios. Sleep mode takes one engine a process.
PLAIN = ("bf16:graphs:reload", "bf16:graphs:buckets", "fp8:graphs:buckets", "static_kv:graphs:reload")
DISCARD = "graphs:sleep2:wake-weights:buckets:wake-cache"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
DEVICES = "FAKE_CUDA_DEVICES"
WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # another process
VERL = {**WORKER, "VERL_DISABLE_TRITON_FP8": "1"}
# what older ones run on the first by default
FIRST_RUNNER = ("moe_fp8", "alibi") if version_of("vllm") < Version("0.33") else ()
PROCESSES: list[tuple[int, dict[str, str], tuple[str, ...]]] = [
    (90, {}, (*PLAIN, "bf16:graphs:out-of-place")),
    (80, {}, ("fp8:graphs:reload", "w4a16:graphs:buckets")),
    (90, {}, ("moe_fp8:graphs:buckets", "mla_fp8_engine:graphs:buckets")),
    (90, {RUNNER: "0"}, ("fp8:graphs:reload", "bf16:buckets")),
    (90, WORKER, ("fp8:graphs:reload",)),
    (90, WORKER, ("fp8_ipc:graphs:ipc",)),
    # bf16 and fp8 come by verl's sender in the whole jobs of tests/patches/verl_cuda
    *([(90, VERL, ("block_kv_verl:graphs:verl",))] if find_spec("verl") else []),
    (90, {DEVICES: "2"}, ("bf16_tp2:graphs:reload", "fp8_tp2:graphs:buckets")),
    (80, {"FAKE_CUDA_FILL": "127"}, (f"fp8:{DISCARD}",)),  # memory comes back full of finite garbage
    (90, {"FAKE_CUDA_FILL": "127"}, (f"block_kv:{DISCARD}",)),
    (90, {"FAKE_CUDA_FILL": "255"}, (f"static_kv:{DISCARD}",)),  # full of NaN
    (90, {"FAKE_CUDA_FILL": "255"}, (f"alibi:{DISCARD}",)),
    (90, {"FAKE_CUDA_FILL": "255", "SLEEP": "1"}, ("bf16:graphs:sleep1:wake:reload",)),
]


def updated(index: int) -> Run:
    capability, more, names = PROCESSES[index]
    return Run("engine", "update", capability, names, tuple(more.items()))


def fresh(index: int) -> Run:
    """Each case once in one process of the same capability, model runner and number of devices.

    Those with verl's worker have one of their own: once there, it records the layouts of all later fp8 checkpoints."""
    same = [
        names
        for at, more, names in PROCESSES
        if kind(at, more) == kind(*PROCESSES[index][:2]) and of_verl(names) == of_verl(PROCESSES[index][2])
    ]
    cases = sorted({name.partition(":")[0] for names in same for name in names})
    capability, more = kind(*PROCESSES[index][:2])
    return Run("engine", "fresh", capability, tuple(cases), more)


def of_verl(names: tuple[str, ...]) -> bool:
    return names[0].endswith(":verl")


def kind(capability: int, more: dict[str, str]) -> tuple[int, tuple[tuple[str, str], ...]]:
    return capability, tuple((name, value) for name, value in more.items() if name in (RUNNER, DEVICES))


def is_tried(case: str) -> bool:
    """Two ranks were tried on vLLM 0.33 only; ALiBi is equal on 0.24 too, but its q_range, k_range and v_range move."""
    return version_of("vllm") >= Version("0.33") or not case.startswith(("bf16_tp2", "fp8_tp2", "alibi"))


RUNS = [
    pytest.param(
        index,
        name,
        id=f"{name}-{capability}" + "".join(f"-{key}={value}" for key, value in more.items()),
        marks=pytest.mark.runs(fresh(index), updated(index)),
    )
    for index, (capability, more, names) in enumerate(PROCESSES)
    for name in names
    if is_tried(name)
]


@pytest.mark.parametrize(("index", "name"), RUNS)
def test_an_updated_engine_answers_as_a_fresh_one(lane, index: int, name: str) -> None:
    _, more, _ = PROCESSES[index]
    wanted, got = lane.result(fresh(index))[name.partition(":")[0]], lane.result(updated(index))[name]
    assert "error" not in wanted and "error" not in got, (wanted.get("error"), got.get("error"))
    assert got["before"] != wanted["answers"]
    assert (wanted["launches"], got["launches"]) == (0, 0) and (got["graphs"] > 0) == ("graphs" in name)
    is_first = RUNNER in more or name.partition(":")[0] in FIRST_RUNNER
    assert all(("gpu_model_runner" in worker["runner"]) == is_first for worker in got["workers"])
    is_equal, stored = got["answers"] == wanted["answers"], differing(wanted["workers"], got["workers"])
    if name.startswith("block_kv_verl"):  # verl takes the inverse of the inverse: the last bit of a scale
        stored = [path for path in stored if not path.endswith("weight_scale_inv")]
    if name.endswith("out-of-place"):  # a captured graph is seen to read the addresses of its capture
        assert got["moved"] and not is_equal
    else:
        assert not got["moved"] and not stored and is_equal


LACKING = Run("engine", "update", 90, ("block_kv_verl:graphs:verl-lacking",), tuple(VERL.items()))


@pytest.mark.skipif(find_spec("verl") is None, reason="verl's sender is not here")
@pytest.mark.runs(LACKING)
def test_a_sync_that_lacks_a_weight_under_verls_own_fp8_is_an_error(lane) -> None:
    """Stock verl goes on with the old weight, without a word (docs/measured/fp8.md)."""
    assert "failed in a weight update" in lane.result(LACKING)["block_kv_verl:graphs:verl-lacking"]["error"]


INT8 = {
    at: (
        Run("engine", "fresh", at, ("int8_triton:graphs", "int8_engine:graphs")),
        Run("engine", "update", at, ("int8_engine:graphs:buckets",)),
    )
    for at in (100, 120)
}


OFTEN = {100: (), 120: (pytest.mark.full,)}


@pytest.mark.parametrize(
    "capability", [pytest.param(at, marks=[pytest.mark.runs(*both), *OFTEN[at]]) for at, both in INT8.items()]
)
def test_int8_takes_a_kernel_that_does_not_refuse(lane, capability: int) -> None:
    """From 10.0 on stock takes CUTLASS's, which refuses, unless told ``linear_backend="triton"``."""
    (fresh, updated) = (lane.result(run) for run in INT8[capability])
    wanted, got = fresh["int8_triton:graphs"], updated["int8_engine:graphs:buckets"]
    assert "Int8 not supported" in fresh["int8_engine:graphs"]["error"]
    assert "error" not in got, got["error"]
    assert got["answers"] == wanted["answers"] != got["before"] and got["graphs"]
    assert not differing(wanted["workers"], got["workers"]) and not got["moved"]


def asleep(case: str) -> int:
    """Return the place in `PROCESSES` of the engine that sleeps with this case."""
    return next(index for index, (_, _, names) in enumerate(PROCESSES) if names == (f"{case}:{DISCARD}",))


def with_fault(mutant: str) -> Run:
    capability, more, names = PROCESSES[asleep(mutants.CAUGHT_AFTER_SLEEP[mutant])]
    return Run("engine", "update", capability, names, (*more.items(), ("CUDA_LAB_MUTANT", mutant)))


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(name, marks=pytest.mark.runs(fresh(asleep(case)), with_fault(name)))
        for name, case in mutants.CAUGHT_AFTER_SLEEP.items()
    ],
)
def test_a_planted_fault_shows_after_sleep(lane, mutant: str) -> None:
    """Without it, `test_an_updated_engine_answers_as_a_fresh_one` has the same engine right."""
    case = mutants.CAUGHT_AFTER_SLEEP[mutant]
    name = f"{case}:{DISCARD}"
    wanted, got = lane.result(fresh(asleep(case)))[case], lane.result(with_fault(mutant))[name]
    assert "error" not in got and got["answers"] != wanted["answers"]


def test_each_fault_is_looked_for() -> None:
    assert set(mutants.MUTANTS) == {*mutants.CAUGHT_BY, *mutants.CAUGHT_AFTER_SLEEP}
