"""Run the part of the SGLang probe in which verl's server drafts, and gets other drafters by the family's calls."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle.rounds import DRAFTERS, MAX_DRAFTS

SEEN = "verl.json"
PROMPTS = [list(range(3, 9)), list(range(10, 30, 2))]
TOKENS = 16
VERSION = 7


def main() -> None:
    """``python -c ... WORKDIR``: write what verl's server answered with each drafter."""
    workdir = Path(sys.argv[1])
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", SGLANG_USE_CPU_ENGINE="1")
    import flashpatch

    # The bandit would draft less after noise, and acceptance is judged here instead of by the family.
    flashpatch.enable("cpu", "bf16", "eagle", adapt=False, rollback=1.0)
    seen: dict[str, Any] = {"tokens": {}, "flushed": {}}
    try:
        asyncio.run(_run(workdir, seen))
    except BaseException as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / SEEN).write_text(json.dumps(seen))


async def _run(workdir: Path, seen: dict[str, Any]) -> None:
    from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, UPDATE
    from flashpatch.patches.eagle.verl_sglang import start_call
    from flashpatch.verify import verl_sglang_server as verl

    exact, noise, _ = (str(workdir / name) for name in DRAFTERS)
    drafting = dict(
        attention_backend="torch_native",
        prefill_attention_backend="intel_amx",
        decode_attention_backend="intel_amx",
        speculative_draft_attention_backend="intel_amx",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=exact,
        speculative_num_steps=MAX_DRAFTS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=MAX_DRAFTS + 1,
        dtype="float32",
    )
    with verl.local_ray():
        server = verl.server(str(workdir / "target"), 0, **drafting)
        await server.launch_server.remote()
        for number, (name, path) in enumerate([("exact", exact), ("noise", noise), ("exact again", exact)]):
            if number:
                await start_call(server, UPDATE, (path, VERSION + number))
            answers = await verl.answers(server, PROMPTS, TOKENS)
            seen["tokens"][name] = [[int(token) for token in one[: len(one) // 2]] for one in answers]
            [seen["flushed"][name]] = await start_call(server, FLUSH, ())
        await asyncio.sleep(1.5)  # until every process has written its last row
