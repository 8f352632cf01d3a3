"""SGLang engines take syncs with fingerprints: what is refused, by what text, and that the engine lives."""

from typing import Any

import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang

VICTIM = "model.layers.1.mlp.down_proj.weight"
WENT = [True, "Success"]
SESSION = f"fsdp.{lab.FRAMEWORK}.update_weights_from_tensor"
#: With whether SGLang finds AMX, for which it packs weights. Sessions of 0.5.12 are fp8's.
FAMILIES = [("bf16,fsdp", "1"), ("fsdp,bf16", "0"), *([] if lab.OLD else [("fsdp", "0")])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two checkpoints of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    return lab.checkpoint(folder, "qwen2", 0), lab.checkpoint(folder, "qwen2", 1)


def sync(source: str, number: int, fault: str = "") -> tuple[str, dict[str, Any]]:
    return "audited", dict(source=source, number=number, fault=fault, victim=VICTIM)


def check_refused(answers: list[Any], text: str) -> None:
    """Check that a session began, that an answer says why it is refused, and that its end did not commit."""
    assert answers[0] == WENT
    message = next((message for done, message in answers if not done), "")
    assert text in message and SESSION in message and not answers[-1][0], answers


@pytest.mark.parametrize(("names", "amx"), FAMILIES, ids=[names for names, _ in FAMILIES])
def test_a_fault_is_answered_and_the_next_sync_goes(models, tmp_path, names, amx):
    """In either order of the families, and without the one that answers for exceptions of its own."""
    a, b = models
    steps = [
        sync(b, 1, "bit"),
        sync(b, 2, "missing"),
        sync(b, 3, "unclosed"),
        "refused",
        sync(b, 4, "unpatched"),
        sync(b, 5),
        "answers",
        sync(b, 5),
        sync(a, 6),
        ("update", dict(source=b)),
        "answers",
    ]
    kind = dict(env={"STANDIN_AMX": amx})
    seen, fresh = lab.together(
        tmp_path,
        dict(model=a, steps=steps, flashpatch=names, **kind),
        dict(model=b, steps=["answers"], **kind),
    )
    assert seen.done and fresh.done, f"{seen}\n{fresh}"
    bit, missing, unclosed, refusal, unpatched, good, after, replay, back, plain, last = seen.steps
    check_refused(
        bit, f"sync 1 is refused: 1 of the weights differ from the trainer's shards: {VICTIM} has other"
    )
    check_refused(missing, f"{VICTIM} is missing")
    check_refused(unclosed, "the announced fingerprints did not arrive")
    check_refused(unpatched, "weights arrive without fingerprints")
    check_refused(replay, "sync 5 is a replay")
    assert [done for done, _ in bit] == [True, True, False, False], "the last bucket was loaded"
    assert [done for done, _ in unclosed] == [True, True, True, False]
    if "bf16" in names:  # which lets no policy generate whose update was not committed, however much has come
        assert "Send a complete update" in refusal
    assert [done for done, _ in unpatched] == [True, False, False, False], "something was loaded"
    for answers in (good, back, plain):
        assert all(done for done, _ in answers), answers
    assert after == last == fresh.steps[0]
    [notes] = [row["notes"]["audit"] for row in lab.rows(seen) if "audit" in row.get("notes", {})]
    assert (notes["sync"], notes["audited"], notes["failed"]) == (6, 4, 4), notes


@pytest.mark.sglang(least="0.5.21")
def test_alone_on_a_cpu_with_amx_it_refuses_to_begin(models, tmp_path):
    """SGLang's packed weights have no loader: stock's scheduler ends in the first bucket."""
    a, b = models
    steps = ["answers", ("update", dict(source=b)), "answers"]
    amx = dict(model=a, steps=steps, env={"STANDIN_AMX": "1"})
    ours, stock = lab.together(tmp_path, dict(amx, flashpatch="fsdp"), amx)
    assert ours.done and not stock.done and "no attribute 'weight_loader'" in stock.log, f"{ours}\n{stock}"
    before, answers, after = ours.steps
    (done, message), version = answers[0], lab.version_of("sglang")
    assert not done and f"fsdp.{lab.FRAMEWORK}.begin_weight_update" in message, message
    assert "packed" in message and "bf16,fsdp" in message and str(version) in message, message
    assert before == after and not any(done for done, _ in answers)


@pytest.mark.full
def test_what_only_the_second_rank_got_wrong_is_heard(models, tmp_path):
    """SGLang returns the first rank's answers; the ranks tell each other before they load."""
    a, b = models
    steps = [sync(b, 1, "rank1"), sync(b, 2), "answers"]
    two_ranks: dict[str, Any] = dict(tp_size=2, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"})
    jobs = [
        dict(model=a, steps=steps, flashpatch="bf16,fsdp", **two_ranks),
        dict(model=b, steps=["answers"], **two_ranks),
    ]
    seen, fresh = lab.together(tmp_path, *jobs)
    assert seen.done and fresh.done, f"{seen}\n{fresh}"
    wrong, good, after = seen.steps
    assert [done for done, _ in wrong] == [True, True, False, False], wrong
    check_refused(wrong, f"{VICTIM} has other values than the trainer's shards")
    assert wrong[2][1].startswith("rank 1: ")
    assert all(done for done, _ in good), good
    assert after == fresh.steps[0]
