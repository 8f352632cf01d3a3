"""Run a rank of the probe whose rollouts are SGLang's: verl's FSDP engine sends through verl's client to verl's server.

Started by `flashpatch.verify.probes.fsdp.verl_sglang_probe`, with the working directory and `job`'s plan. Rank 0 has the
server and writes what it saw; the others take part in the gathering alone, as ranks of a tensor-parallel rollout do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.fsdp import job

SEEN = "verl.json"
PROMPTS = [list(range(5, 36, 3)), list(range(40, 65))]
TOKENS = 8


def main() -> None:
    """``python -c ... WORKDIR``: the rank is in ``RANK``."""
    workdir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    os.environ.update(RAY_LOCAL_WORLD_SIZE="1", SGLANG_USE_CPU_ENGINE="1")
    import flashpatch

    flashpatch.enable("cpu", "bf16")  # verl cannot start this SGLang, and sends it no session, without
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray(timeout_second=int(job.TIMEOUT))
    plan = json.loads((workdir / "plan.json").read_text())
    if rank:
        for weights in _sendings(workdir, rank, plan):
            for _ in weights:
                pass
    else:
        _lead(workdir, plan)
    distributed.destroy_global_process_group()


def _sendings(workdir: Path, rank: int, plan: list[dict[str, Any]]) -> Any:
    """Yield the weights to send, entry by entry: build engines and step as planned."""
    engine, built = None, None
    for entry in plan:
        wanted = (entry["strategy"], entry.get("fsdp_size", -1))
        if wanted != built:
            engine, built = job.build(workdir / "model", *wanted), wanted
        if entry.get("step"):
            job.step(engine, rank, int(os.environ["WORLD_SIZE"]))
        weights, _ = engine.get_per_tensor_param()
        yield job.tampered(weights, entry, {})


def _lead(workdir: Path, plan: list[dict[str, Any]]) -> None:
    seen: dict[str, Any] = {"transfers": []}
    try:
        asyncio.run(_send(workdir, plan, seen))
    except BaseException as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / SEEN).write_text(json.dumps(seen))


async def _send(workdir: Path, plan: list[dict[str, Any]], seen: dict[str, Any]) -> None:
    from flashpatch.verify import verl_sglang_server as verl

    model = str(workdir / "model")
    with verl.local_ray():
        server = verl.server(model, 0, dtype="float32")
        await server.launch_server.remote()
        seen["before"] = await verl.answers(server, PROMPTS, TOKENS)
        client = verl.client(model, 0)
        for number, (entry, weights) in enumerate(zip(plan, _sendings(workdir, 0, plan)), 1):
            saw: dict[str, Any] = {"error": ""}
            try:
                await client.update_weights(weights, global_steps=number)
            except Exception as error:
                saw["error"] = job.text_of(error)
                for _ in weights:  # the other ranks gather on
                    pass
            if not entry.get("tamper"):
                saw["answers"] = await verl.answers(server, PROMPTS, TOKENS)
            seen["transfers"].append(saw)
        await asyncio.sleep(1.5)  # until every process has written its last row
