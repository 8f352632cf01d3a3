"""Tell before a job what a drafter brings on vLLM. Engines open in turn: stock's without a drafter, stock's with it and a fixed
number of drafts, and one with the family, whose bandit chooses. Each answers the same prompts in batches."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from flashpatch.commands.report import Table, emit
from flashpatch.errors import PatchError
from flashpatch.patches._shared import child
from flashpatch.patches.eagle.errors import eagle_error

BATCHES = (1, 8, 64)
_WAYS = ("none", "stock", "bandit")
_TOKENS = 64  # of an answer
_TURNS = 3  # of each batch, of which the last counts: an engine warms up, and the bandit learns
_PROMPTS = ("Seven times eight is", "def add(a, b):", "The capital of France is", "Once upon a time")
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main(arguments: Sequence[str]) -> int:
    """Run ``flashpatch-verify eagle --drafter D --model M``; return 0 if all engines answered, else 2."""
    parser = argparse.ArgumentParser(prog="flashpatch-verify eagle", description=__doc__)
    add = parser.add_argument
    add(
        "--drafter", required=True, type=os.path.abspath, metavar="DIR", help="of an EAGLE or EAGLE-3 drafter"
    )
    add("--model", required=True, type=os.path.abspath, metavar="DIR", help="of its target")
    add("--prompts", type=os.path.abspath, metavar="FILE", help=".parquet or .jsonl with a column prompt")
    add("--drafts", type=int, default=3, metavar="N", help="drafts per step (default 3)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of all requests (default 1)")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="arguments of vllm.LLM")
    add("--json", action="store_true", help="print JSON")
    asked = vars(parser.parse_args(arguments))
    from flashpatch.patches.eagle.train.drafter_config import kind_of

    try:
        asked["kind"] = kind_of(Path(asked["drafter"]))
        found = {way: _measured(way, asked) for way in _WAYS}
    except (PatchError, OSError, ValueError) as error:
        print(f"flashpatch-verify: {error}", file=sys.stderr)
        return 2
    emit(found, [_table(found)], asked["json"])
    return 0


def _measured(way: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_answered` does in a process of its own; raise PatchError if its engine does not answer."""
    print(f"an engine opens: {way}", file=sys.stderr, flush=True)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("FLASHPATCH")}
    own = {**os.environ, "FLASHPATCH": "eagle"} if way == "bandit" else kept
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    done = child.alone(["-P", "-m", __name__, way, json.dumps(asked)], {**own, **here})
    if done.returncode:
        raise eagle_error(
            "drafter", f"vLLM ({way}) ends with ...{done.stderr[-900:]}", "Give --engine what it lacks."
        )
    return json.loads(done.stdout.splitlines()[-1])


def _answered(way: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return by batch the last turn's tokens per second, its tokens per verification, and its steps by arm of the bandit."""
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.vllm import spec_controller, warmup

    more = {"enable_prefix_caching": False, "disable_log_stats": False, "max_num_seqs": max(BATCHES)}
    names = {"method": "kind", "model": "drafter", "num_speculative_tokens": "drafts"}
    if way != "none":
        more["speculative_config"] = {name: asked[one] for name, one in names.items()}
    llm, found = LLM(asked["model"], **{**more, **asked["engine"]}), {}
    sampling = SamplingParams(
        temperature=asked["temperature"], max_tokens=_TOKENS, ignore_eos=True, detokenize=False
    )
    prompts = warmup.read_prompts(Path(asked["prompts"])) if asked["prompts"] else _PROMPTS

    def counts() -> Counter[str]:
        verified = {one.name: one.value for one in llm.get_metrics() if one.name in (_DRAFTS, _ACCEPTED)}
        arms = [one.policy.pulls() for one in spec_controller.controllers.values()]
        return Counter(verified) + Counter(*arms)

    for batch in BATCHES:
        for _ in range(_TURNS):
            before, began = counts(), time.perf_counter()
            warmup.ask(llm, list(islice(cycle(prompts), batch)), sampling)
            seconds = time.perf_counter() - began
        arms = counts() - before
        drafted, accepted = arms.pop(_DRAFTS, 0), arms.pop(_ACCEPTED, 0)
        length = 1 + accepted / drafted if drafted else 1.0
        found[str(batch)] = {"tokens/s": batch * _TOKENS / seconds, "length": length, "arms": arms}
    return found


def _table(found: Mapping[str, Any]) -> Table:
    rows = []
    for batch, way in product(map(str, BATCHES), _WAYS):
        one = found[way][batch]
        steps = sum(one["arms"].values())
        arms = ", ".join(f"{arm} {count / steps:.0%}" for arm, count in one["arms"].items())
        rows.append((batch, way, f"{one['tokens/s']:.1f}", f"{one['length']:.2f}", arms))
    columns = ("batch", "drafts", "tokens per second", "tokens per verification", "steps by arm")
    return Table("What the drafter brings", columns, rows)


if __name__ == "__main__":
    print(json.dumps(_answered(sys.argv[1], json.loads(sys.argv[2]))))
