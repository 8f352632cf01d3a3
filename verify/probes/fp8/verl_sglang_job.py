"""Run the part of the SGLang probe in which verl sends the weights: its own server in Ray, its own client here."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

SEEN = "verl.json"
PROMPTS = [list(range(5, 36, 3)), list(range(200, 225))]


def main() -> None:
    """``python -c ... WORKDIR``: write what servers on the models a and b in it answered, and what verl's client got."""
    workdir = Path(sys.argv[1])
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", SGLANG_USE_CPU_ENGINE="1")
    import flashpatch

    flashpatch.enable("cpu")
    seen: dict[str, Any] = {"answers": {}}
    try:
        asyncio.run(_run(workdir, seen))
    except BaseException as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / SEEN).write_text(json.dumps(seen))


async def _run(workdir: Path, seen: dict[str, Any]) -> None:
    import torch

    from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
    from flashpatch.verify import verl_sglang_server as verl

    a, b = str(workdir / "a"), str(workdir / "b")
    torch.distributed.init_process_group("gloo", init_method=f"file://{workdir}/store", rank=0, world_size=1)
    with verl.local_ray():
        first, fresh = verl.server(a, 0), verl.server(b, 1)
        await asyncio.gather(first.launch_server.remote(), fresh.launch_server.remote())
        found = seen["answers"]
        found["before"] = await verl.answers(first, PROMPTS)
        found["fresh"] = await verl.answers(fresh, PROMPTS)
        await verl.client(b, 1).update_weights(verl.weights(b), global_steps=1)
        found["identity"] = await verl.answers(fresh, PROMPTS)
        trainer = verl.client(a, 0)
        for step, (name, source) in enumerate([("perturbation", b), ("return", a)], 1):
            await trainer.update_weights(verl.weights(source), global_steps=step)
            found[name] = await verl.answers(first, PROMPTS)
        seen["receipts"] = WEIGHT_SYNC.take_receipts()
        await asyncio.sleep(1.5)  # until every process has written its last row
