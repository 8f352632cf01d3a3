"""Ranks that agree through a real store, each in a process of its own, or hear why not."""

import os

import pytest
import warm
from machine import limit
from tree import SUPPORT

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

RANK = '''
import faulthandler, os, sys, time
faulthandler.dump_traceback_later(float(os.environ["HANGS"]), exit=True)
import torch, torch.distributed as dist

rank, ranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)

from flashpatch.patches.fp8.update import ranks as rank_consensus
import fp8_toys as toys

rank_consensus.TIMEOUT = 60
calls = [None]
consensus = rank_consensus.RankConsensus(range(ranks), call=lambda: calls[0])
A, B, C = (toys.checkpoint(seed) for seed in range(3))

def engine(**keywords):
    """An engine whose post-processing sums over the ranks: hangs unless all of them enter it together."""
    def process(module):
        toys.process(module)
        if isinstance(module, toys.Linear):
            dist.all_reduce(torch.ones(1))
    made = toys.engine("transposed", **keywords)
    made.managed.adapter.consensus = consensus
    made.managed.adapter.process = process
    return made

def update(engine, weights, cuts=(3, 8)):
    dist.barrier()  # as a call from the engine core begins on all ranks
    try:
        for bucket in toys.cut(weights, *cuts):
            engine.load(bucket)
        engine.managed.finish()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"

def exact(engine, weights):
    return toys.same_answers(engine.model, toys.fresh("transposed", weights))

def say(*words):
    print(*words, flush=True)
'''


SCENARIOS = """
say("#faults")
for atomic in ("layer", "model"):
    e = engine(atomic=atomic)
    say(update(e, B), exact(e, B))
    for bad in range(ranks):
        for fault in ("nan", "unknown", "missing"):
            weights = list(A)
            if rank == bad:
                name, value = weights[5 + rank]
                if fault == "nan":
                    weights[5 + rank] = (name, value / 0)
                elif fault == "unknown":
                    weights[5 + rank] = ("nobody.weight", value)
                else:
                    del weights[5 + rank]
            outcome = update(e, weights)
            named = rank == bad or fault == "missing" or f"rank {bad}: " in outcome
            heard = outcome != "done" and named
            say("heard" if heard else outcome, e.managed.may_generate == (atomic == "model"))
            say(update(e, C), exact(e, C), e.managed.may_generate)

say("#versions")
for atomic in ("layer", "model"):
    e = engine(atomic=atomic)
    if rank == 1:
        def fails(undo):
            raise MemoryError("too late")
        e.managed._hooks.run = fails
    update(e, B)
    say(e.managed.may_generate, e.managed.version == consensus.update)
    vars(e.managed._hooks).pop("run", None)
    say(update(e, C), exact(e, C))
    say(e.managed.version)

say("#apart")
for atomic in ("layer", "model"):
    e = engine(atomic=atomic)
    for good in (B, C, A):  # rank 1 fails before it loads anything, and only then; three good updates follow
        calls[0] = (calls[0] or 0) + 1
        if rank == 1 and good is B:
            dist.barrier()
            consensus.announce_failed_call(calls[0], "OSError: lost")
            say("failed")
        else:
            say(update(e, good))
    for good in (B, C):
        say(update(e, good), exact(e, good), e.managed.version == consensus.update)
calls[0] = None

say("#doubted")
for atomic in ("layer", "model"):
    e = engine(atomic=atomic)
    def unnamed(weights, *cuts):  # nobody ends it; then a request comes
        dist.barrier()
        for bucket in toys.cut(weights, *cuts):
            e.load(bucket)
        dist.barrier()
        e.managed.before_request()
    unnamed(A, 3, 8)
    unnamed(B[:4] + B[5:] if rank == 1 else B, 3, 8)  # in doubt on the rank that misses one, there alone
    say(e.managed.state)
    unnamed(C)
    say(exact(e, C), e.managed.version == consensus.update)

say("#stages")
stages = rank_consensus.RankConsensus([0, 1] if rank < 2 else [2], range(3), name="stages", call=lambda: calls[0])
def staged(atomic):
    # ranks 0 and 1 hold one pipeline stage, rank 2 another
    e = toys.engine("transposed", atomic=atomic)
    e.managed.adapter.consensus = stages
    return e
for atomic in ("layer", "model"):
    e = staged(atomic)
    say(update(e, B), exact(e, B))
    say(update(e, A[:-1] if rank == 2 else A, cuts=(2,) if rank == 2 else (3, 8)) != "done")
    say(update(e, C), exact(e, C), e.managed.version == stages.update)
    e.load(A)  # nobody ends it
    e.managed.before_request()
    say(exact(e, A), e.managed.version == stages.update)
    e = staged(atomic)  # whose sender has named no end
    e.load(B[:-1] if rank == 2 else B)
    e.managed.before_request()
    say(e.managed.state)
    e.load(B[-1:] if rank == 2 else [])
    e.managed.before_request()
    say(exact(e, B))
    for good in (False, True):  # nobody ends it, and one stage fails: the other has it open when the next comes
        dist.barrier()
        calls[0] = (calls[0] or 0) + 1
        try:
            e.load([(n, t / 0) for n, t in A] if rank == 2 and not good else A)
        except Exception:
            pass
        dist.barrier()
    e.managed.before_request()
    say(exact(e, A), e.managed.version == stages.update)
calls[0] = None

say("#collective")
import random
from flashpatch.patches.fp8.update import update as staged_update
def drawn(weights):
    # a reader that shares the reading among the ranks: each brings its own order, all draw together
    for item in random.Random(rank).sample(weights, len(weights)):
        dist.all_reduce(torch.ones(1))
        yield item
A12, B12 = (toys.checkpoint(seed, blocks=12) for seed in (0, 1))
for between in (staged_update._BETWEEN, 16):  # one call ends before, or long after, ranks agree in it
    staged_update._BETWEEN = between
    e = toys.Engine(toys.Model(blocks=12), A12)
    e.managed.adapter.consensus = rank_consensus.RankConsensus(range(ranks), name=f"collective-{between}")
    dist.barrier()
    try:
        e.load(drawn(B12))
        e.managed.finish()
        want = toys.Model(blocks=12)
        want.load_weights(B12)
        toys.process_all(want)
        say(toys.same_answers(e.model, want))
    except Exception as error:
        say(f"{type(error).__name__}: {error}")

say("#keys")
store = dist.distributed_c10d._get_default_store()
def kept():
    dist.barrier()
    found = store.num_keys()
    dist.barrier()
    return found
e = staged("layer")
before = None
for number in range(12):
    update(e, B)
    if number == 4:
        before = kept()
say(kept() <= before)

say("#twice")
dist.barrier()
if rank == 1:  # looks before the others have answered, and goes on once they are ahead
    reason = consensus._given_up
    consensus._given_up = lambda *args: time.sleep(0.6) or reason(*args)
else:
    time.sleep(0.2)
for _ in range(2):
    consensus.begin()
    say(consensus.agree_on_commit(None)[0], consensus.update)

say("#late")
rank_consensus.TIMEOUT = float(os.environ["PATIENCE"])
dist.barrier()
consensus.begin()
if rank == 2:
    dist.barrier()  # the others come here once they have given up
    say(consensus.agree(None)[0])
else:
    say(consensus.agree(None)[0])
    dist.barrier()
"""


# seconds that ranks wait for one that does not come; the two that do may be stopped a while
PATIENCE = round(limit(4))


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Scenario to what each of three ranks printed in it."""
    ranks, folder = 3, tmp_path_factory.mktemp("ranks")
    script = folder / "rank.py"
    script.write_text(RANK + SCENARIOS)
    environment = os.environ | {
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATIENCE": str(PATIENCE),
        "HANGS": str(limit(240)),
    }
    done = warm.run_together(
        warm.TORCH,
        [([script, str(rank), str(ranks), str(folder / "store")], environment) for rank in range(ranks)],
        cwd=folder,
        timeout=limit(300),
    )
    scenarios: dict[str, list[list[str]]] = {}
    for rank in done:
        assert rank.returncode == 0, rank.stderr
        for part in rank.stdout.split("#")[1:]:
            name, *lines = part.splitlines()
            scenarios.setdefault(name, []).append(lines)
    return scenarios


def test_a_failure_on_any_rank_is_heard_by_all_and_mended(said):
    """Each rank fails in three ways under both contracts, and is named; nobody hangs in the collective of the others."""
    for lines in said["faults"]:
        assert lines == 2 * (["done True"] + 9 * ["heard True", "done True True"])


def test_versions_meet_again_after_a_failure_behind_the_last_agreement(said):
    """One rank fails where the others cannot hear it any more; the next update brings them together."""
    for rank, lines in enumerate(said["versions"]):
        assert lines[0] == f"{rank != 1} {rank != 1}"
        assert lines[3] == f"True {rank != 1}"  # undone: the old policy, which the gate tells by its version
        assert lines[1] == lines[4] == "done True"
        assert [lines[2], lines[5]] == [said["versions"][0][2], said["versions"][0][5]]


def test_a_rank_that_failed_before_it_began_joins_the_next_update(said):
    """The others learn at once that it will not come; then all count alike again."""
    for rank, lines in enumerate(said["apart"]):
        for start in (0, 5):
            first = lines[start]
            assert first == "failed" if rank == 1 else "rank 1: OSError: lost" in first
            assert lines[start + 1 : start + 5] == ["done", "done", "done True True", "done True True"]


def test_ranks_of_which_one_is_in_doubt_begin_the_next_update_together(said):
    """On the others its first name alone tells that it has begun."""
    for lines in said["doubted"]:
        assert lines == 2 * ["open", "True True"]


def test_pipeline_stages_commit_together(said):
    """One stage has not received everything: none commits, with or without an end."""
    for lines in said["stages"]:
        assert lines == 2 * ["done True", "True", "done True True", "True True", "open", "True", "True True"]


def test_a_reader_that_draws_together_meets_no_agreement(said):
    """Ranks that complete layers at different tensors must not wait for one another there."""
    assert said["collective"] == 3 * [["True", "True"]]


def test_keys_of_old_updates_are_deleted(said):
    assert said["keys"] == 3 * [["True"]]


def test_a_rank_that_sees_an_agreement_after_the_others_have_begun_the_next_takes_part_in_both(said):
    """An adapter is agreed on twice in one call."""
    first, *others = said["twice"]
    assert [line.split()[0] for line in first] == ["None", "None"] and others == [first, first]


def test_a_rank_that_comes_too_late_hears_that_the_others_gave_up(said):
    """It must not go on into post-processing alone."""
    assert {line for lines in said["late"] for line in lines} == {
        f"ranks [2] did not come to an agreement within {PATIENCE} s"
    }
