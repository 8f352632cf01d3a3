"""Compare an updated model's storage with a fresh load's."""

import re
from dataclasses import dataclass
from typing import Any

from cuda_lab.state import kernels

OTHERWISE = (
    *"moe_config.max_capture_size ._aot_cache_dir ._aot_compilation_path ._compiled_bytecode".split(),
)


@dataclass(frozen=True)
class Comparison:
    """Say how storage after an update differs from a fresh load's."""

    differing: list[str]  # paths whose content is another
    only_fresh: list[str]  # only_fresh, only_updated: paths that one of both has
    only_updated: list[str]
    moved: list[str]  # moved, lost: tensors that are at another address than before the update, or gone
    lost: list[str]
    changed: int  # tensors that the update changed
    values: int  # paths compared
    kernels: frozenset[str]  # class names of kernels and expert backends, the same for both

    @property
    def faults(self) -> dict[str, list[str]]:
        """What is wrong, by kind, each with its first paths; empty if nothing is."""
        kinds = ("differing", "only_fresh", "only_updated", "moved", "lost")
        return {kind: getattr(self, kind)[:5] for kind in kinds if getattr(self, kind)}


def compare(fresh: dict[str, Any], updated: dict[str, Any]) -> Comparison:
    """Compare two results of `cuda_lab.storage`, neither of which holds an error."""
    a, b, start = fresh["found"], updated["found"], updated["start"]
    before, after = updated["before"], updated["addresses"]
    return Comparison(
        differing=[path for path in a if path in b and a[path] != b[path]],
        only_fresh=[path for path in a if path not in b],
        only_updated=[path for path in b if path not in a],
        moved=[path for path in before if path in after and before[path] != after[path]],
        lost=[path for path in before if path not in after],
        changed=sum(start[path] != b[path] for path in b if path in start and b[path][0] == "tensor"),
        values=len(a),
        kernels=frozenset(kernels(a)),
    )


def differing(fresh: list[dict[str, Any]], updated: list[dict[str, Any]]) -> list[str]:
    """Compare what two engines' workers hold, by rank; return the paths that differ, or that one of both has.

    Of the KV cache everything but its content, which is what requests have left there; not how large a batch is
    captured, as fresh engines are eager; nor where the compiler keeps what it made, a folder per process."""
    if len(fresh) != len(updated):
        return [f"{len(fresh)} ranks, {len(updated)} updated"]
    return [
        f"{rank}:{path}"
        for rank, (one, other) in enumerate(zip(fresh, updated, strict=True))
        for path in sorted({*one["found"], *other["found"]})
        if not path.endswith(OTHERWISE)
        and _without_requests(path, one["found"]) != _without_requests(path, other["found"])
    ]


def _without_requests(path: str, found: dict[str, Any]) -> Any:
    what = found.get(path)
    return what[:-1] if what and re.search(r"\.kv_cache(\[\d+\])*$", path) else what
