"""Receipts that agree, and every way in which they may not."""

from types import SimpleNamespace

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.transfer.receipts import WorkerVersions, metrics
from flashpatch.patches.fp8.verl_vllm import worker as rollout_worker


def worker(rank: int, pid: int, version: int, step: int = 3, sync: str = "s", **changes) -> dict:
    facts = dict(id=sync, step=step, rank=rank, world=2, host="h", pid=pid, states=["ready"], adapter=False)
    facts |= dict(before=[version - 1], after=[version], retry=False)
    return {**facts, **dict(receive=2.0, load=1.0, process=0.5, bytes=10, tensors=2), **changes}


def sync(rank: int, workers: list | None, step: int = 3) -> dict:
    facts = dict(step=step, id="s", judged=True, replica=rank // 2, rank=rank % 2, workers=workers)
    facts |= dict(called=workers is not None, bytes=10, tensors=2)
    return facts | dict(seconds=3.75, export=0.25, gather=0.75, send=2.25, waited=1.2)


def two_replicas(version: int = 4, step: int = 3) -> list:
    """Two replicas of two ranks; the first rank of each has the receipts of both."""
    given = []
    for replica in (0, 1):
        receipts = [worker(rank, 10 * replica + rank, version, step) for rank in (0, 1)]
        given += [[sync(2 * replica, receipts, step)], [sync(2 * replica + 1, None, step)]]
    return given


def problem(given: list, step: int | None = 3, book: WorkerVersions | None = None) -> str:
    with pytest.raises(PatchError) as raised:
        (book or WorkerVersions()).check(step, given)
    assert raised.value.patch == "fp8.verl.checkpoint_manager_update_weights"
    assert "The trainer stops" in str(raised.value)
    return raised.value.problem


def test_replicas_may_have_been_born_at_different_times():
    given = two_replicas()
    for receipt in given[2][0]["workers"]:
        receipt.update(before=[0], after=[1])
    WorkerVersions().check(3, given)


@pytest.mark.parametrize("after, said", [(3, "3 became 3"), (5, "3 became 5"), (2, "3 became 2")])
def test_a_version_that_did_not_move_by_one(after, said):
    given = two_replicas()
    for receipt in given[2][0]["workers"]:
        receipt["after"] = [after]
    found = problem(given)
    assert f"replica 1, rank 0: version {said}, not one new one" in found
    assert f"replica 1, rank 1: version {said}, not one new one" in found and "replica 0" not in found


def test_after_a_failed_update_numbers_may_skip():
    given = two_replicas()
    for receipt in given[0][0]["workers"]:
        receipt.update(after=[5], retry=True)
    WorkerVersions().check(3, given)


def test_a_version_that_changed_between_two_syncs():
    book = WorkerVersions()
    book.check(3, two_replicas(4, 3))
    given = two_replicas(5, 4)
    given[0][0]["workers"][0].update(before=[1], after=[2])
    assert "replica 0, rank 0: it held version 1, though the sync before left it at 4" in problem(
        given, 4, book
    )


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda given: given.__setitem__(1, None), "sending rank 1 carries no FlashPatch"),
        (lambda given: given[3].clear(), "sending rank 3 took no part"),
        (lambda given: given[0][0].update(workers=None), "the server of replica 0 gave no receipt"),
        (lambda given: given[0][0]["workers"].pop(), "1 of 2 ranks of replica 0 gave a receipt"),
        (
            lambda given: given[0][0].update(workers=None, called=False),
            "no worker of replica 0 gave a receipt",
        ),
        (lambda given: given[0][0]["workers"][0].update(id="old"), "its receipt is of another sync"),
        (lambda given: given[0][0]["workers"][0].update(before=[], after=[]), "no model that can be updated"),
        (lambda given: given[2][0].update(step=2), "replica 1 was sent step 2 by rank 2"),
        (
            lambda given: given[0][0]["workers"][1].update(before=[6], after=[7]),
            "replica 0 holds several versions: rank [0] at [4], rank [1] at [7]",
        ),
        (
            lambda given: given[0][0]["workers"][1].update(states=["broken"]),
            "replica 0, rank 1: its policy is broken",
        ),
    ],
)
def test_what_differs_or_is_missing_is_named(change, said):
    given = two_replicas()
    change(given)
    assert said in problem(given)


def test_updates_of_another_kind_are_not_judged():
    given = [[{"step": 3, "id": "d", "judged": False}] for _ in range(2)]
    WorkerVersions().check(3, given)
    assert metrics(given)["sync/bytes"] == 0


def test_the_numbers_of_a_sync():
    given = two_replicas()
    given[0][0]["workers"][1]["load"] = 1.25
    numbers = metrics(given)
    assert numbers == {
        "timing_s/sync/gather": 1.0,
        "timing_s/sync/transfer": 0.5,
        "timing_s/sync/load": 1.25,
        "timing_s/sync/process": 0.5,
        "timing_s/sync/total": 4.0,
        "sync/bytes": 40.0,
        "sync/tensors": 2.0,
        "sync/policy_version": 4.0,
    }
    assert set(metrics([])) == set(numbers)


def test_a_drafter_that_verl_does_not_update_owes_no_receipt(monkeypatch):
    """Two managed models in a worker, of which verl brings weights for one."""
    policy, drafter = object(), object()
    managed = {id(policy): SimpleNamespace(version=7), id(drafter): SimpleNamespace(version=0)}
    monkeypatch.setattr(rollout_worker.model_registry, "get", lambda model: managed.get(id(model)))
    updates = SimpleNamespace(_iter_all_models=lambda: iter([policy, object()]))
    assert [model.version for model in rollout_worker._updated(updates)] == [7]


def test_replicas_with_other_weights_are_named():
    """Versions agree, the bits do not; replicas that store weights in another way are not compared with them."""

    def given(*checksums: str) -> list:
        rows = []
        for replica, checksum in enumerate(checksums):
            receipts = [
                worker(rank, 10 * replica + rank, 4, checksums=[f"{checksum}{rank}"]) for rank in (0, 1)
            ]
            rows += [[sync(2 * replica, receipts)], [sync(2 * replica + 1, None)]]
        return rows

    WorkerVersions().check(3, given("fp8 a", "fp8 a", "None b"))
    with pytest.raises(
        PatchError, match="rank 0 does not hold the same weights everywhere: replica 0 a0, replica 1 c0"
    ):
        WorkerVersions().check(3, given("fp8 a", "fp8 c"))


def with_adapters(*digests: str | None) -> list:
    """One replica per digest, each sent an adapter; None: its workers list none."""
    rows = []
    for replica, digest in enumerate(digests):
        held = {} if digest is None else {"123": digest}
        receipts = [
            worker(rank, 10 * replica + rank, 4, adapter=True, before=[4], adapters=held) for rank in (0, 1)
        ]
        rows += [[sync(2 * replica, receipts)], [sync(2 * replica + 1, None)]]
    return rows


def test_replicas_with_other_adapters_or_none_are_named():
    WorkerVersions().check(3, with_adapters("aa", "aa"))
    said = problem(with_adapters("aa", "bb"))
    assert "LoRA adapters differ: replica 0, rank 0 {'123': 'aa'}" in said
    assert "replica 1, rank 1 {'123': 'bb'}" in said
    assert "replica 0, rank 0: it was sent a LoRA adapter and lists none" in problem(with_adapters(None))
