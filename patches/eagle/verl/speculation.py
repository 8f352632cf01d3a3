"""Read and write an engine's speculation settings in verl's configuration.

Each engine has settings of its own; `of` returns the class that knows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import Get

ID = "eagle.verl.validate_config"
ROLLOUT = "actor_rollout_ref.rollout"
SPECULATIVE = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"


class Speculation(NamedTuple):
    """Hold a configured speculation: ``method`` (eagle, eagle3 or another; "" for none) and the drafter's ``model``."""

    method: str = ""
    model: str = ""


class Vllm:
    """Know vLLM's settings, ``engine_kwargs.vllm.speculative_config``, a mapping or JSON of one; `Sglang` has the same methods.

    Attributes:
        engine: verl's name of the engine."""

    engine = "vllm"

    def configured(self, get: Get) -> Speculation:
        """Return what the configuration says; raises PatchError if that cannot be read."""
        given = get(SPECULATIVE) or {}
        try:
            given = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            given = None
        if not isinstance(given, Mapping):
            raise PatchError(
                f"{SPECULATIVE}={get(SPECULATIVE)!r} is not a mapping.",
                patch=ID,
                advice="Write it as {method:eagle,model:/path/to/drafter,num_speculative_tokens:3}.",
            )
        unnamed = "a method that the recipe does not name" if given else ""
        return Speculation(str(given.get("method") or unnamed), str(given.get("model") or ""))

    def conflicts(self, get: Get, drafter: str) -> Iterator[str]:
        """Yield the settings that exclude eagle's option ``drafter``."""
        if get(SPECULATIVE):
            yield f"{SPECULATIVE}={get(SPECULATIVE)} (eagle's option drafter={drafter} sets it)"

    def wanted(self, get: Get, speculation: Speculation, tokens: int) -> Iterator[tuple[str, Any]]:
        """Yield settings and values that make the engine draft ``tokens`` per step."""
        method, model = speculation
        yield SPECULATIVE, {"method": method, "model": model, "num_speculative_tokens": tokens}

    def needed(self, get: Get, speculation: Speculation) -> Iterator[tuple[str, Any]]:
        """Yield settings and values without which a configured drafter would not keep its weights."""
        return iter(())

    def remarks(self, get: Get, speculation: Speculation) -> Iterator[str]:
        """Yield this engine's reasons why a drafter cannot be trained."""
        return iter(())


class Sglang:
    """Know ``engine_kwargs.sglang.speculative_*``."""

    engine = "sglang"
    _METHODS = {"EAGLE": "eagle", "NEXTN": "eagle", "EAGLE3": "eagle3"}

    def configured(self, get: Get) -> Speculation:
        algorithm = str(get(f"{SGLANG}.speculative_algorithm") or "")
        method = self._METHODS.get(algorithm.upper(), algorithm)
        return Speculation(method, str(get(f"{SGLANG}.speculative_draft_model_path") or ""))

    def conflicts(self, get: Get, drafter: str) -> Iterator[str]:
        for name in ("speculative_algorithm", "speculative_draft_model_path"):
            if get(f"{SGLANG}.{name}"):
                yield f"{SGLANG}.{name}={get(f'{SGLANG}.{name}')} (eagle's option drafter={drafter} sets it)"
        topk = get(f"{SGLANG}.speculative_eagle_topk") or 1
        if topk > 1 and not get(f"{SGLANG}.speculative_num_draft_tokens"):
            yield f"{SGLANG}.speculative_eagle_topk={topk} (trees need speculative_num_draft_tokens too)"

    def wanted(self, get: Get, speculation: Speculation, tokens: int) -> Iterator[tuple[str, Any]]:
        steps = get(f"{SGLANG}.speculative_num_steps") or tokens
        wanted = {
            "speculative_algorithm": speculation.method.upper(),
            "speculative_draft_model_path": speculation.model,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": steps + 1,
        }
        yield from _unset(get, wanted)

    def needed(self, get: Get, speculation: Speculation) -> Iterator[tuple[str, Any]]:
        wanted: dict[str, Any] = {}
        if speculation.model and get(f"{ROLLOUT}.load_format") == "dummy":
            wanted["speculative_draft_load_format"] = "auto"  # else it is random, and no update completes it
        saver = get(f"{SGLANG}.enable_memory_saver", True) and get(f"{ROLLOUT}.free_cache_engine", True)
        if speculation.model and saver:
            wanted["enable_draft_weights_cpu_backup"] = True  # else sleep discards the drafter
        yield from _unset(get, wanted)

    def remarks(self, get: Get, speculation: Speculation) -> Iterator[str]:
        if get(f"{ROLLOUT}.data_parallel_size", 1) not in (None, 1):
            yield f"{ROLLOUT}.data_parallel_size={get(f'{ROLLOUT}.data_parallel_size')}: not followed on SGLang"
        if get(f"{ROLLOUT}.disaggregation.enabled"):
            yield f"{ROLLOUT}.disaggregation.enabled=True: prefill and decode servers are not followed"


def _unset(get: Get, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield those of SGLang's arguments for which the user chose nothing, with their values."""
    for name, value in wanted.items():
        if get(f"{SGLANG}.{name}") is None:
            yield f"{SGLANG}.{name}", value


Dialect = Vllm | Sglang
_DIALECTS: dict[str, Dialect] = {dialect.engine: dialect for dialect in (Vllm(), Sglang())}


def of(get: Get) -> Dialect | None:
    """Return the dialect of the configured rollout engine; None for engines other than vLLM and SGLang."""
    return _DIALECTS.get(get(f"{ROLLOUT}.name"))
