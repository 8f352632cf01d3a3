"""One thing goes wrong in verl's real weight transfer: both sides hear why."""

import json
from pathlib import Path

import pytest
import warm
from cpu_lab import environment
from machine import limit
from tree import SUPPORT

pytestmark = pytest.mark.verl

LAB = SUPPORT / "transfer_lab.py"
PATIENCE = round(limit(6))  # seconds of transfer_timeout
SECONDS = (
    # after which a side that has not ended hangs; FlashPatch's sides need one or two, or the limit below
    limit(20)
)

#: What went wrong, and the words that both sides must hear of it; None where a side was killed or stopped.
PLACE = "LookupError: cannot place this tensor"
CASES = {
    "first": (PLACE, PLACE),
    "middle": (PLACE, PLACE),
    "last": (PLACE, PLACE),
    "alone": (PLACE, PLACE),
    "before": ("LookupError: no such engine", "LookupError: no such engine"),
    "keeps-view": ("BufferError", "BufferError"),
    "worker-killed": ("rollout", None),
    "worker-killed-alone": ("the rollout worker that receives the weights is gone", None),
    "worker-killed-early": ("the rollout engine could not take the weights", None),
    "worker-stopped": (f"has not answered for {PATIENCE} s", None),
    "generator": ("ValueError: no weights today", "ValueError: no weights today"),
    "too-large": ("AssertionError: Weight huge", "AssertionError: Weight huge"),
    "sender-killed": (None, "the trainer that sends the weights"),
    "sender-killed-early": (None, "the trainer that sends the weights has ended"),
    "sender-stopped": (None, f"has not answered for {PATIENCE} s"),
}
BY_SENDER = ("generator", "too-large")


def lab(folder: Path, names: str, together: int, *cases: str) -> dict[str, dict]:
    """What became of cases under ``FLASHPATCH=names``; what hangs may as well hang together."""
    folder.mkdir()
    env = environment(folder, f"[fp8]\ntransfer_timeout = {PATIENCE}\n", FLASHPATCH=names)
    command = [LAB, str(SECONDS), str(together), *cases]
    done = warm.run(warm.VERL_VLLM, command, env=env, cwd=folder, timeout=limit(400))
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What became of every case with our transfers."""
    return lab(
        tmp_path_factory.mktemp("ours") / "lab", "cpu,bf16", 4, "good", "job-a", "job-b", "after", *CASES
    )


def test_a_transfer_without_fault(ours):
    good = ours["good"]
    assert good["trainer"]["ended"] == good["worker"]["ended"] == "returned", good
    assert good["worker"]["names"] == [f"w{n}" for n in range(5)]


def test_jobs_whose_sockets_verl_names_alike_do_not_meet(ours):
    """What stock jobs do depends on who binds last, so the names themselves are compared too."""
    from flashpatch.patches.fp8.verl.transfer.weight_sync import job_socket_name

    handle = "ipc:///run/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    assert len({handle, job_socket_name(handle, "run-a"), job_socket_name(handle, "run-b")}) == 3
    found = [ours[job][role] for job in ("job-a", "job-b") for role in ("trainer", "worker")]
    assert {seen["ended"] for seen in found} == {"returned"}, found


def test_it_leaves_a_receipt(ours):
    (sync,) = ours["good"]["trainer"]["receipts"]
    (worker,) = sync["workers"]
    assert sync["step"] == worker["step"] == 7 and sync["id"] == worker["id"]
    assert sync["bytes"] == worker["bytes"] == 5 * 150_000 * 4 and sync["tensors"] == worker["tensors"] == 5
    for seconds in (sync["gather"], sync["send"], worker["receive"], worker["load"], worker["process"]):
        assert 0 < seconds <= sync["seconds"]
    assert sync["gather"] + sync["waited"] <= sync["send"]


@pytest.mark.parametrize("case", CASES)
def test_both_sides_hear_why(ours, case):
    for role, words in zip(("trainer", "worker"), CASES[case]):
        seen = ours[case][role]
        if words is None:
            assert seen["ended"] in ("killed", "hung"), (role, seen)
            continue
        assert seen["ended"] == "raised" and words in seen["error"], (role, seen)


@pytest.mark.parametrize("case", ["first", "middle", "last", "alone"])
def test_the_trainer_gets_the_original_traceback(ours, case):
    said = ours[case]["trainer"]["error"]
    assert "Traceback (most recent call last)" in said and "in deep_inside" in said
    assert "BufferError" not in said


@pytest.mark.parametrize("case", BY_SENDER)
def test_the_worker_gets_the_senders_traceback(ours, case):
    said = ours[case]["worker"]["error"]
    assert "the trainer that sends the weights failed" in said and "in async_send_weights" in said


def test_a_failure_after_the_last_answer_arrives_too(ours):
    said = ours["after"]["trainer"]["error"]
    assert "ArithmeticError: could not post-process" in said and "in _iter_all_models_with_config" in said


def test_nothing_stays_in_shared_memory(ours):
    for case, (expected, _) in CASES.items():
        if expected is not None:
            assert ours[case]["trainer"]["left"] == [], case
