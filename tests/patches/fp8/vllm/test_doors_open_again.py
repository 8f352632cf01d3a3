"""After a failure at any of vLLM's doors the sender's ordinary next sync is taken, and nothing else is ever answered."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

VICTIM = "model.layers.1.mlp.down_proj.weight"
BROKE = "the sender's connection broke"


# --- what runs in the engine's process: doors, through which a checkpoint goes in parts, or half of it before the sender dies


def _parts(path: str, dies: bool) -> Iterator[list[updates.Named]]:
    items = list(models.weights(path))
    for number, start in enumerate(range(0, len(items), 4)):
        if dies and number == 3:
            raise OSError(BROKE)
        yield items[start : start + 4]


def _one_call(llm: Any, path: str, dies: bool) -> None:
    engines.inner_model(llm).load_weights(itertools.chain.from_iterable(_parts(path, dies)))


def _with_an_end(llm: Any, path: str, dies: bool) -> None:
    for part in _parts(path, dies):
        engines.inner_model(llm).load_weights(part)
    updates.finish(llm)


def _reload(llm: Any, path: str, dies: bool) -> None:
    weights = itertools.chain.from_iterable(_parts(path, dies))
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))


def _session(llm: Any, path: str, dies: bool) -> None:
    llm.start_weight_update()
    for part in range(7):
        if dies and part == 4:
            raise OSError(BROKE)
        llm.update_weights({"update_info": dict(path=path, part=part, parts=7)})
    llm.finish_weight_update()


def _transfer(llm: Any, path: str, dies: bool) -> None:
    """A session whose sender dies while the worker receives."""
    llm.start_weight_update()
    llm.update_weights({"update_info": dict(path=path, part=0, parts=2)})
    llm.update_weights({"update_info": dict(path=f"{path}/gone" if dies else path, part=1, parts=2)})
    llm.finish_weight_update()


def _by_name(llm: Any, path: str, dies: bool) -> None:
    import flashpatch

    with flashpatch.update(llm):
        for part in _parts(path, dies):
            engines.inner_model(llm).load_weights(part)


DOORS: dict[str, Callable[[Any, str, bool], None]] = {
    "one call": _one_call,
    "post-processing": _with_an_end,
    "reload": _reload,
    "session": _session,
    "transfer": _transfer,
    "flashpatch.update": _by_name,
}
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
        for (name, door), fault in itertools.product(DOORS.items(), FAULTS):
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
        said = [updates.error(lambda: _session(llm, b, True)), updates.error(llm.finish_weight_update)]
        return [*said, updates.error(lambda: _session(llm, b, False)), engines.greedy(llm)]


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
    assert BROKE in died and "did not come" in ended
    assert again is None and answers == oracle.answers(ab[1])["tokens"]
