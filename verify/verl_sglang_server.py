"""Open verl's SGLang servers and their clients in the trainer, without a trainer, by verl's own configuration, with family cpu on.

A server is verl's own Ray actor; a client is the ``ServerAdapter`` through which verl's trainer sends weights."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRAINER = {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
"""Variables of a trainer of one rank beside such servers."""


def configuration(model: str, **engine: Any) -> Any:
    """Return verl's configuration with rollouts on SGLang's CPU engine, of a checkpoint with a tokenizer; ``engine`` are more
    of SGLang's arguments."""
    from flashpatch.verify.probes import jobs, verl_actor

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


@contextmanager
def local_ray() -> Iterator[None]:
    """Run a Ray of this process's own, with its sockets in a short path below /tmp, which their names need."""
    import ray

    small = dict(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(**small, _temp_dir=folder)
        try:
            yield
        finally:
            ray.shutdown()


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


async def answers(actor: Any, prompts: Sequence[list[int]], tokens: int = 8) -> list[list[float]]:
    """Return tokens and log-probabilities of a greedy continuation of each prompt."""
    found, settings = [], dict(logprobs=True, temperature=0.0, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        output = await actor.generate.remote(prompt, settings, f"{number}-{time.monotonic()}")
        found.append([*output.token_ids, *output.log_probs])
    return found


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of ``size`` numbered words beside a model, which verl's server reads and the probe does not use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(size - 1)} | {"<end>": size - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    ends = dict(eos_token="<end>", pad_token="<end>")
    PreTrainedTokenizerFast(tokenizer_object=plain, **ends).save_pretrained(folder)
