"""Break one patch of FlashPatch at a time, in every process forked from a warm interpreter that has imported this module.

``$MUTANT`` is a kind and the id of a patch, read when the patch is put in place:

- ``bypass``: the call is counted, and the original's result is returned as it is;
- ``one_rank``: the same on rank 1 alone, of processes that are ranks;
- ``uncounted``: the wrapper acts, and nothing is counted;
- ``once``: the wrapper acts in its first call alone."""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import wrapt

KINDS = ("bypass", "one_rank", "uncounted", "once")
VARIABLE = "MUTANT"


def _bypass(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _mutate(kind: str, site: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    if kind == "bypass" or (kind == "one_rank" and os.environ.get("RANK") == "1"):
        return _bypass
    if kind == "once":
        calls = itertools.count()
        return lambda original, *args, **kwargs: (
            wrapper(original, *args, **kwargs) if not next(calls) else original(*args, **kwargs)
        )
    if kind == "uncounted":

        class Silent(type(site.counter)):
            def hit(self) -> None: ...

        site.counter = Silent(site.patch.id)
    return wrapper


def _in_place_of_wrap(module: Any) -> None:
    honest = module.Site.wrap

    def wrap(self: Any, wrapper: Callable[..., Any]) -> None:
        kind, _, id = os.environ.get(VARIABLE, "").partition(" ")
        honest(self, _mutate(kind, self, wrapper) if id == self.patch.id else wrapper)

    module.Site.wrap = wrap


def _fork(module: Any) -> None:
    """No mutant: let vLLM fork its processes, so that they are broken alike."""
    module.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


wrapt.register_post_import_hook(_in_place_of_wrap, "flashpatch.arming.site")
for _name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
    wrapt.register_post_import_hook(_fork, _name)
