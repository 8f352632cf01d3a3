"""Doors through which a checkpoint goes into a vLLM engine in parts, or half of it before its sender dies."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import vllm_updates as updates
from vllm_lab import engines, models

BROKE = "the sender's connection broke"


def _parts(path: str, dies: bool) -> Iterator[list[updates.Named]]:
    items = list(models.weights(path))
    for number, start in enumerate(range(0, len(items), 4)):
        if dies and number == 3:
            raise OSError(BROKE)
        yield items[start : start + 4]


def _one_call(llm: Any, path: str, dies: bool = False) -> None:
    engines.inner_model(llm).load_weights(itertools.chain.from_iterable(_parts(path, dies)))


def _with_an_end(llm: Any, path: str, dies: bool = False) -> None:
    """As verl does it."""
    for part in _parts(path, dies):
        engines.inner_model(llm).load_weights(part)
    updates.finish(llm)


def _reload(llm: Any, path: str, dies: bool = False) -> None:
    weights = itertools.chain.from_iterable(_parts(path, dies))
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))


def session(llm: Any, path: str, dies: bool = False) -> None:
    llm.start_weight_update()
    for part in range(7):
        if dies and part == 4:
            raise OSError(BROKE)
        llm.update_weights({"update_info": dict(path=path, part=part, parts=7)})
    llm.finish_weight_update()


def _transfer(llm: Any, path: str, dies: bool = False) -> None:
    """A session whose sender dies while the worker receives."""
    llm.start_weight_update()
    llm.update_weights({"update_info": dict(path=path, part=0, parts=2)})
    llm.update_weights({"update_info": dict(path=f"{path}/gone" if dies else path, part=1, parts=2)})
    llm.finish_weight_update()


def _by_name(llm: Any, path: str, dies: bool = False) -> None:
    import flashpatch

    with flashpatch.update(llm):
        for part in _parts(path, dies):
            engines.inner_model(llm).load_weights(part)


DOORS: dict[str, Callable[..., None]] = {
    "one call": _one_call,
    "post-processing": _with_an_end,
    "reload": _reload,
    "session": session,
    "transfer": _transfer,
    "flashpatch.update": _by_name,
}
