"""Let verl send the weights to its own SGLang servers in Ray, from its own client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

PROMPTS = [list(range(5, 36, 3)), list(range(200, 225))]


async def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Ask servers on the models a and b, send each of them the other's, and take the client's receipts."""
    import torch

    import flashpatch

    flashpatch.enable("cpu")
    from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
    from flashpatch.verify import verl_sglang_server as verl

    a, b = str(workdir / "a"), str(workdir / "b")
    found = seen["answers"] = {}
    torch.distributed.init_process_group("gloo", init_method=f"file://{workdir}/store", rank=0, world_size=1)
    with verl.local_ray():
        first, fresh = verl.server(a, 0), verl.server(b, 1)
        await asyncio.gather(first.launch_server.remote(), fresh.launch_server.remote())
        found["before"] = await verl.answers(first, PROMPTS)
        found["fresh"] = await verl.answers(fresh, PROMPTS)
        await verl.client(b, 1).update_weights(verl.weights(b), global_steps=1)
        found["identity"] = await verl.answers(fresh, PROMPTS)
        trainer = verl.client(a, 0)
        for step, (name, source) in enumerate([("perturbation", b), ("return", a)], 1):
            await trainer.update_weights(verl.weights(source), global_steps=step)
            found[name] = await verl.answers(first, PROMPTS)
        seen["receipts"] = WEIGHT_SYNC.take_receipts()
