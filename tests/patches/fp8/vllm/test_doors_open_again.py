"""After a failure at any of vLLM's doors the sender's ordinary next sync is taken, and nothing else is ever answered."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import update_doors
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

VICTIM = "model.layers.1.mlp.down_proj.weight"


# --- what runs in the engine's process


FAULTS = ("nan", "missing", "dies")


def failures(a: str, sent: dict[str, str], atomic: str) -> dict[str, list[Any]]:
    """Through each door each fault, then a whole policy: error and answers of the one and of the other."""
    updates.register_backend()
    found: dict[str, list[Any]] = {}
    backend = dict(backend="ipc")
    with opened("bf16", a, options=dict(atomic=atomic), weight_transfer_config=backend) as llm:
        llm.init_weight_transfer_engine({"init_info": {}})

        def ask() -> Any:
            answers: list[Any] = []
            return updates.error(lambda: answers.append(engines.greedy(llm))) or answers[0]

        whole = itertools.cycle(("b", "a"))
        for (name, door), fault in itertools.product(update_doors.DOORS.items(), FAULTS):
            bad = sent.get(fault, sent["c"])
            tries = [(bad, fault == "dies"), (sent[next(whole)], False)]
            found[f"{name}, {fault}"] = [
                said
                for path, dies in tries
                for said in (updates.error(lambda path=path, dies=dies: door(llm, path, dies)), ask())
            ]
    return found


def advice(a: str, b: str) -> list[str | None]:
    """A sender dies in its session, and another one does what vLLM says: it ends that session, then sends."""
    updates.register_backend()
    with opened("bf16", a, weight_transfer_config=dict(backend="ipc")) as llm:
        llm.init_weight_transfer_engine({"init_info": {}})
        said = [
            updates.error(lambda: update_doors.session(llm, b, True)),
            updates.error(llm.finish_weight_update),
        ]
        return [*said, updates.error(lambda: update_doors.session(llm, b, False)), engines.greedy(llm)]


# --- the tests


def _bad(base: str, how: str) -> str:
    """A checkpoint like `base` with a value that is no number, or without a tensor."""
    with models.making(Path(base).with_name(f"{Path(base).name}-{how}")) as (target, work):
        if work is not None:
            tensors = dict(models.weights(base))
            if how == "nan":
                tensors[VICTIM][3, 5] = float("nan")
            else:
                del tensors[VICTIM]
            models.write_changed(work, Path(base), tensors)
    return str(target)


@pytest.mark.parametrize("atomic", ["layer", "model"])
def test_the_next_sync_is_taken(runner: scenario.Runner, atomic: str) -> None:
    a, b, c = (updates.checkpoint("qwen2", seed) for seed in (0, 1, 2))
    known = {name: oracle.answers(path)["tokens"] for name, path in zip("ab", (a, b), strict=True)}
    sent = dict(a=a, b=b, c=c, nan=_bad(c, "nan"), missing=_bad(c, "missing"))
    got = runner(failures, a, sent, atomic)
    whole = itertools.cycle("ba")
    held = known["a"]
    for case, (error, after, second, answers) in got.items():
        named = {"nan": "NaN", "missing": "down_proj", "dies": ""}[case.partition(", ")[2]]
        assert named in f"{error} {after}" or case == "one call, missing", case
        assert (isinstance(after, str) and "PatchError" in after) or (atomic == "model" and after == held), (
            case
        )
        held = known[next(whole)]
        assert (second, answers) == (None, held), case


def test_what_vllm_advises_works(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    died, ended, again, answers = runner(advice, *ab)
    assert update_doors.BROKE in died and "did not come" in ended
    assert again is None and answers == oracle.answers(ab[1])["tokens"]
