"""Tell before a job what a drafter brings on vLLM: ``flashpatch-verify eagle --drafter D --model M``.

Engines open in turn: stock's without a drafter, stock's with it and a fixed number of drafts, and one with the family, whose bandit
chooses. Each answers batches of the same prompts greedily."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from flashpatch.commands.report import Table, emit
from flashpatch.errors import PatchError
from flashpatch.verify.probes import jobs

BATCHES = (1, 8, 64)
_TOKENS = 128  # of an answer
_TURNS = 4  # of each batch, the last of which is measured: an engine warms up, and the bandit learns
_TIMEOUT = 3600.0  # seconds; large models load slowly
_WAYS = {"none": jobs.FRESH, "fixed": jobs.FRESH, "bandit": "job"}


def command(options: argparse.Namespace) -> int:
    """Run the command; return 0 if all engines answered, else 1. Raises PatchError or ValueError for what cannot be read."""
    from flashpatch.patches.eagle.train.drafter_config import kind_of
    from flashpatch.patches.eagle.vllm.warmup import read_prompts
    from flashpatch.verify.exact.command import TEXT, tokens

    if jobs.engine_here() != "vllm":
        raise ValueError("--drafter opens vLLM engines, and vLLM is not installed here")
    model, drafter = (os.path.abspath(one) for one in (options.model, options.drafter))
    if missing := [one for one in (model, drafter) if not Path(one, "config.json").exists()]:
        raise ValueError(f"{' and '.join(missing)} has no config.json")
    kind = kind_of(Path(drafter))
    asked = dict(model=model, kind=kind, drafter=drafter, drafts=options.drafts)
    asked["engine"] = json.loads(options.engine)
    asked["prompts"] = read_prompts(options.prompts) if options.prompts else [tokens(model, TEXT)[0]]
    found: dict[str, Any] = {"trained": _problem(drafter, model, kind)}
    root = Path(tempfile.mkdtemp(prefix="flashpatch-drafter-"))
    for way, name in _WAYS.items():
        print(f"an engine opens: {way}", file=sys.stderr, flush=True)
        folder = root / way
        folder.mkdir()
        (folder / "asked.json").write_text(json.dumps({**asked, "drafts": asked["drafts"] * (way != "none")}))
        ours = {"FLASHPATCH_LEDGER": str(root / "ledger"), "FLASHPATCH": "eagle"} if way == "bandit" else {}
        one = jobs.job("eagle.drafter:run", folder, name, {**jobs.engine().IN_ONE, **ours})
        ended = jobs.run([one], folder, _TIMEOUT)
        found[way] = {"problem": ended.problem, **ended.seen[name]}
    emit(found, _tables(found, asked["drafts"]), options.json)
    if any(found[way]["problem"] for way in _WAYS):
        print(f"logs are in {root}", file=sys.stderr)
        return 1
    shutil.rmtree(root)
    return 0


def _problem(drafter: str, model: str, kind: str) -> str:
    """Say why the drafter cannot be co-trained; "" if it can."""
    from flashpatch.patches.eagle.train.export import check_round_trip

    try:
        check_round_trip(drafter, model, kind, "vllm")
    except PatchError as error:
        return str(error)
    return ""


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """In a process of its own: answer every batch, and note tokens per second, tokens per verified draft, and the arms that ran."""
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.vllm import spec_controller, warmup

    asked = json.loads((workdir / "asked.json").read_text())
    plain = all(isinstance(one[0], int) for one in asked["prompts"])
    arguments = dict(enable_prefix_caching=False, disable_log_stats=False, skip_tokenizer_init=plain)
    if drafts := asked["drafts"]:
        drafting = {"method": asked["kind"], "model": asked["drafter"], "num_speculative_tokens": drafts}
        arguments["speculative_config"] = drafting
    llm = LLM(asked["model"], **{"max_num_seqs": max(BATCHES), **arguments, **asked["engine"]})
    sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)

    def counts() -> Counter[str]:
        verified = {
            one.name: one.value
            for one in llm.get_metrics()
            if "spec_decode_num" in one.name and hasattr(one, "value")
        }
        arms = [one.policy.pulls() for one in spec_controller.controllers.values()]
        return Counter({**verified, **(arms[0] if arms else {})})

    for batch in BATCHES:
        prompts = list(islice(cycle(asked["prompts"]), batch))
        for _ in range(_TURNS):
            before, began = counts(), time.perf_counter()
            warmup.ask(llm, prompts, sampling)
            now = {"rate": batch * _TOKENS / (time.perf_counter() - began)}
        now["counts"] = dict(counts() - before)
        seen[str(batch)] = now


def _tables(found: dict[str, Any], drafts: int) -> list[Table]:
    rows = []
    for batch in map(str, BATCHES):
        none, fixed, bandit = (found[way].get(batch, {}) for way in _WAYS)
        rates = [f"{one['rate']:.1f}" if one else "-" for one in (none, fixed, bandit)]
        counted = Counter(fixed.get("counts", {}))
        verified = counted["vllm:spec_decode_num_drafts"]
        accepted = counted["vllm:spec_decode_num_accepted_tokens"] / verified + 1 if verified else 0.0
        arms = {arm: count for arm, count in bandit.get("counts", {}).items() if ":" not in arm}
        took = ", ".join(f"{arm} {count / sum(arms.values()):.0%}" for arm, count in arms.items() if count)
        rows.append(
            (
                batch,
                *rates,
                f"{accepted:.2f}" if accepted else "-",
                took or "nothing: the number is fixed here",
            )
        )
    notes = [f"{way}: {found[way]['problem']}" for way in _WAYS if found[way]["problem"]]
    notes.append(f"co-trained under verl: {found['trained'] or 'yes'}")
    columns = ("batch", "without", f"{drafts} drafts", "bandit", "tokens per step", "the bandit took")
    return [Table("Tokens per second", columns, rows, notes=notes)]
