"""verl's SGLang server and its client in the trainer, without a trainer: real Ray, real engines, updates by hand.

    python verl_sglang_lab.py WORLD OTHER FOLDER

opens a server on the model in WORLD, sends it that and the one in OTHER in many ways, some of which fail, and prints
what was seen as one line of JSON, name to value. Errors are given as text."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs, verl_actor

FAULTS = Path(__file__).with_name("sglang_faults")
PROMPTS = [[5, 6, 7, 8], list(range(20, 45))]


def weights(model: str, but: int | None = None) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint; with ``but`` an error in place of the tensor of that number."""
    from safetensors.torch import load_file

    for number, named in enumerate(load_file(Path(model) / "model.safetensors").items()):
        if number == but:
            raise ValueError("no weights today")
        yield named


def configuration(model: str, **engine: Any) -> Any:
    """Return verl's configuration with rollouts on SGLang's CPU engine, of a checkpoint with a tokenizer; ``engine`` are more
    of SGLang's arguments."""
    settings = [f"actor_rollout_ref.model.path={model}"]
    settings += [
        f"actor_rollout_ref.rollout.{name}={value}" for name, value in jobs.given()["sglang_rollout"].items()
    ]
    given = {**jobs.given()["sglang_engine"], **engine}
    settings += [f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{n}={v}" for n, v in given.items()]
    return verl_actor.configuration(settings)


def server(model: str, number: int, variables: dict[str, str] | None = None, **engine: Any) -> Any:
    """Return a server's actor, named as verl names that of replica ``number``; its ``launch_server`` starts the engine."""
    import ray
    from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

    get_rollout_replica_class("sglang")
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    config = configuration(model, **engine)
    variables = {"SGLANG_USE_CPU_ENGINE": "1", **(variables or {})}
    options = dict(num_cpus=0, max_concurrency=8, name=f"sglang_server_{number}_0")
    actor = ray.remote(SGLangHttpServer).options(**options, runtime_env=dict(env_vars=variables))
    place = dict(replica_rank=number, node_rank=0, nnodes=1, cuda_visible_devices="", base_gpu_id=0)
    own = dict(config=config.actor_rollout_ref.rollout, model_config=config.actor_rollout_ref.model)
    return actor.remote(**own, **place, rollout_mode=RolloutMode.HYBRID, workers=[])


def client(model: str, number: int) -> Any:
    """Return verl's client of a server, as it is in a trainer of one rank; torch.distributed must be initialized."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    config = configuration(model).actor_rollout_ref
    rollout, own = (
        omega_conf_to_dataclass(config.rollout),
        omega_conf_to_dataclass(config.model, HFModelConfig),
    )
    return ServerAdapter(rollout, own, None, replica_rank=number)


async def answers(actor: Any, tokens: int = 8) -> list[list[float]]:
    """Greedy continuations of all prompts: tokens and log-probabilities."""
    found, settings = [], dict(logprobs=True, temperature=0.0, max_tokens=tokens)
    for number, prompt in enumerate(PROMPTS):
        output = await actor.generate.remote(prompt, settings, f"{number}-{time.monotonic()}")
        found.append([*output.token_ids, *output.log_probs])
    return found


async def error(awaitable: Any) -> str:
    """The text of the error that something ends with; empty where it ends well."""
    try:
        await awaitable
    except Exception as problem:
        return str(problem)
    return ""


async def seen(a: str, b: str, folder: Path) -> AsyncIterator[tuple[str, Any]]:
    """Open a server and do everything."""
    import ray
    import torch

    import flashpatch

    fault = folder / "fault"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    paths = os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")])
    server_of_a = server(a, 0, {"PYTHONPATH": paths, "SGLANG_FAULT": str(fault)})
    yield "launched", (launched := await error(server_of_a.launch_server.remote()))
    if launched:
        return
    trainer = client(a, 0)
    yield "a", await answers(server_of_a)
    yield "update", await error(trainer.update_weights(weights(b), global_steps=1))
    yield "receipts", receipts()
    yield "a as b", await answers(server_of_a)
    fault.write_text("raise")
    yield "raised", await error(trainer.update_weights(weights(a), global_steps=2))
    yield "refused", await error(answers(server_of_a, 2))
    yield "again", await error(trainer.update_weights(weights(a), global_steps=3))
    yield "receipts again", receipts()
    yield "a again", await answers(server_of_a)
    yield "generator", await error(trainer.update_weights(weights(b, but=9), global_steps=4))
    yield "refused too", await error(answers(server_of_a, 2))
    yield "incomplete", await error(trainer.update_weights(part(b), global_steps=5))
    yield "healed", await error(trainer.update_weights(weights(b), global_steps=6))
    yield "a as b again", await answers(server_of_a)
    fault.write_text("stop")
    began = time.monotonic()
    yield "stopped", await error(trainer.update_weights(weights(a), global_steps=7))
    yield "stopped seconds", time.monotonic() - began
    go_on(fault)
    yield "went on", await error(trainer.update_weights(weights(a), global_steps=8))
    yield "a at last", await answers(server_of_a)
    # SGLang's server follows its dead scheduler in a second, or in a minute on a very busy machine
    flashpatch.enable("fp8", transfer_timeout=240.0)
    fault.write_text("kill")
    began = time.monotonic()
    yield "killed", await error(trainer.update_weights(weights(b), global_steps=9))
    yield "killed seconds", time.monotonic() - began
    ray.shutdown()


def go_on(fault: Path) -> None:
    """Let the process that the fault has stopped go on."""
    import psutil

    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SGLANG_FAULT") == str(fault)
            if ours and process.status() == psutil.STATUS_STOPPED:
                process.resume()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass


def part(model: str) -> Iterator[tuple[str, Any]]:
    """All but the last tensor."""
    yield from list(weights(model))[:-1]


def receipts() -> list[dict[str, Any]]:
    """The receipts of this process's updates since the last call."""
    from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC

    return WEIGHT_SYNC.take_receipts()


async def main(a: str, b: str, folder: Path) -> None:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    found = {}
    try:
        async for name, value in seen(a, b, folder):
            found[name] = value
            print(f"{name}: {str(value)[:200]}", file=sys.stderr, flush=True)
    finally:
        print(json.dumps(found), flush=True)
        sys.stdout.flush()
        os._exit(0)  # stopped servers would keep Ray waiting; the test ends what is left


if __name__ == "__main__":
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1", TORCHDYNAMO_DISABLE="1")
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
