"""Let verl's SGLang server draft, and give it other drafters by the family's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle.job import DRAFTERS, MAX_DRAFTS

PROMPTS = [list(range(3, 9)), list(range(10, 30, 2))]
TOKENS = 16
VERSION = 7


async def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Ask verl's server with each drafter."""
    import flashpatch

    # The bandit would draft less after noise, and acceptance is judged here instead of by the family.
    flashpatch.enable("cpu", "bf16", "eagle", adapt=False, rollback=1.0)
    from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, UPDATE
    from flashpatch.patches.eagle.verl_sglang import start_call
    from flashpatch.verify import verl_sglang_server as verl
    from flashpatch.verify.probes.eagle import tiny

    seen |= {"tokens": {}, "flushed": {}}
    exact, noise, _ = (str(workdir / name) for name in DRAFTERS)
    with verl.local_ray():
        server = verl.server(str(workdir / "target"), 0, dtype="float32", **tiny.drafting(exact, MAX_DRAFTS))
        await server.launch_server.remote()
        for number, (name, path) in enumerate([("exact", exact), ("noise", noise), ("exact again", exact)]):
            if number:
                await start_call(server, UPDATE, (path, VERSION + number))
            answers = await verl.answers(server, PROMPTS, TOKENS)
            seen["tokens"][name] = [[int(token) for token in one[: len(one) // 2]] for one in answers]
            [seen["flushed"][name]] = await start_call(server, FLUSH, ())
