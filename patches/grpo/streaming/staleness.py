"""Record which version of the policy generated each token, through verl's client and agent loops, and say how old it is.

A request that an update of the weights stops goes on under the next version, and verl keeps the first and the last
one. Here each part of a response is recorded with its version and length. Later turns of an agent loop, of which verl
keeps nothing, add to the list of the first turn.

Version ``n`` is the policy after step ``n``, and step ``n`` trains version ``n - 1``: a token that this version generated
has age 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import holding

CLIENT = "verl.workers.rollout.llm_server"
KEY = "token_versions"
"""Key among a sample's extra fields: a list of ``[version, tokens]``, in the order of the generated tokens."""
FIRST = "token_versions_from"
"""Key among them: the number of the list's tokens that are of earlier turns."""
_SHOWN = 4  # ages with a share of their own; older ones share the last

patches = Patches(
    "grpo",
    "verl>=0.9",
    evidence="optional",  # only asynchronous trainers resume requests
    why="verl keeps a response's first and last version, and of later turns nothing: how old a token is cannot be "
    "said, nor bounded.",
    remove_when="verl records the version of each token.",
)


class Parts(list):
    """Hold a response's parts; several turns of one request share it."""


_parts: ContextVar[Parts | None] = ContextVar("flashpatch_grpo_parts", default=None)
_of_request: WeakValueDictionary[str, Parts] = WeakValueDictionary()


@patches.wrap(f"{CLIENT}:LLMServerClient.generate", params="request_id", relies_on="output.extra_fields")
async def generate_part(original, self, request_id: Any, **arguments: Any) -> Any:
    """Record version and length of what each call to a server returns; one version's tokens in a row are one part."""
    output = await original(self, request_id=request_id, **arguments)
    parts, tokens = _parts.get(), len(output.token_ids)
    if parts is not None and tokens:
        version = output.extra_fields.get("global_steps")
        if parts and parts[-1][0] == version:
            parts[-1][1] += tokens
        else:
            parts.append([version, tokens])
    return output


@patches.wrap(
    f"{CLIENT}:FullyAsyncLLMServerClient.generate", params="request_id", relies_on="final_output.extra_fields"
)
async def generate_whole(original, self, request_id: Any, **arguments: Any) -> Any:
    """Add the list of versions and lengths to a response's extra fields, as "token_versions", and where this turn begins.

    The client repeats what updates stop."""
    parts = _of_request.setdefault(str(request_id), Parts())
    before = sum(tokens for _, tokens in parts)
    with holding(_parts, parts):
        output = await original(self, request_id=request_id, **arguments)
    output.extra_fields |= {KEY: parts, FIRST: before}
    return output


def ages(tag: Mapping[str, Any], extra: Mapping[str, Any] | None, step: int, tokens: int) -> Counter[int]:
    """Count a sample's generated tokens by age: in the list of its request, those from its first turn's on.

    Args:
        tag: verl's tag of the sample, with the version of its first token; all tokens count as that old if nothing
            more is known.
        extra: the sample's extra fields, with the version of each part under `KEY`.
        step: number of the training step.
        tokens: how many the sample has.

    Returns:
        empty if no version is known."""
    extra = extra or {}
    parts = extra.get(KEY) or [[tag.get("min_global_steps"), tokens]]
    ends = [*accumulate((length for _, length in parts), initial=0)]
    first = max(
        min(extra.get(FIRST, 0), ends[-1] - tokens), 0
    )  # a loop may keep the last turn's fields for all
    found: Counter[int] = Counter()
    for (version, _), begin, end in zip(parts, ends, ends[1:]):
        if version is not None and (here := min(end, first + tokens) - max(begin, first)) > 0:
            found[max(step - 1 - version, 0)] += here
    return found


def histogram(samples: Iterable[Counter[int]]) -> dict[str, float]:
    """Return the share of tokens per age, ``stream/staleness/0`` to ``3`` and ``4_or_more``, and ``mean`` and ``max``;
    empty without tokens."""
    counted = sum(samples, Counter())
    total = counted.total()
    if not total:
        return {}
    found = {f"stream/staleness/{age}": counted[age] / total for age in range(_SHOWN)}
    found[f"stream/staleness/{_SHOWN}_or_more"] = 1 - sum(found.values())
    return {
        **found,
        "stream/staleness/mean": sum(age * tokens for age, tokens in counted.items()) / total,
        "stream/staleness/max": float(max(counted)),
    }
