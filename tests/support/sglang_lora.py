"""LoRA adapters of an SGLang engine: steps of `sglang_job`, named ``lora.load`` and so on there."""

import asyncio
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

ONE_COPY = Version(metadata.version("sglang")) < Version("0.5.18")
"""Whether SGLang takes an adapter's tensors once for all ranks."""
NAME = "policy"


def load(
    engine: Any, folder: str, name: str = NAME, how: str = "tensors", sync: str = "", **changed: Any
) -> list[Any]:
    """Send an adapter, by its path, as tensors or as one flattened bucket; whether it was taken, and the message.

    ``sync`` asks for receipts; ``changed`` changes its configuration."""
    if how == "path":
        answer = engine.load_lora_adapter(name, folder)
    else:
        answer = _wait(engine, sending(engine, folder, name, how, sync, **changed))
    return [answer.success, answer.error_message]


def tensors(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(Path(folder) / "adapter_model.safetensors"))


def sending(
    engine: Any, folder: str, name: str = NAME, how: str = "tensors", sync: str = "", **changed: Any
) -> Any:
    """What is to be awaited for an adapter to be sent."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    found, load_format = tensors(folder), None
    if how == "flattened":
        flat = FlattenedTensorBucket(named_tensors=list(found.items()))
        found = dict(flattened_tensor=flat.get_flattened_tensor(), metadata=flat.get_metadata())
        load_format = "flattened_bucket"
    if ONE_COPY:
        payload = dict(serialized_tensors=MultiprocessingSerializer.serialize(found, output_str=True))
    else:
        ranks = range(engine.server_args.tp_size)
        payload = dict(serialized_named_tensors=[MultiprocessingSerializer.serialize(found) for _ in ranks])
    config = {**json.loads((Path(folder) / "adapter_config.json").read_text()), **changed}
    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name=name, config_dict=config, load_format=load_format, rid=sync or None, **payload
    )
    return engine.tokenizer_manager.load_lora_adapter_from_tensors(request, None)


def overwrite(engine: Any, folder: str, source: str) -> None:
    """Write the bytes of another adapter's file into an adapter's, as a trainer that keeps one path may do."""
    file = "adapter_model.safetensors"
    with (Path(folder) / file).open("r+b") as target:
        target.write((Path(source) / file).read_bytes())


def across(engine: Any, folder: str, count: int = 48) -> dict[str, Any]:
    """Send an adapter while a request runs under its name: the answer, the request's tokens, how many there were before."""
    import sglang_job

    seen: list[Any] = []
    params = dict(temperature=0, max_new_tokens=count, ignore_eos=True)

    async def ask() -> None:
        stream = await engine.async_generate(
            input_ids=sglang_job.PROMPTS[2], sampling_params=params, lora_path=NAME, stream=True
        )
        async for one in stream:
            seen.append(one)

    async def run() -> Any:
        asked = asyncio.create_task(ask())
        while len(seen) < 3:
            await asyncio.sleep(0.005)
        before = len(seen[-1]["output_ids"])
        answer = await sending(engine, folder)
        during = len(seen[-1]["output_ids"])
        await asked
        return before, during, answer

    before, during, answer = _wait(engine, run())
    said = [answer.success, answer.error_message]
    return dict(answer=said, before=before, during=during, ids=seen[-1]["output_ids"])


def many(engine: Any, folders: list[str], versions: int, count: int = 12) -> dict[str, Any]:
    """Send adapters under one name, in turn, each while a request runs under the one before; their tokens, by version."""
    import sglang_job

    params = dict(temperature=0, max_new_tokens=count, ignore_eos=True)
    begun = [0]

    async def ask() -> list[int]:
        stream = await engine.async_generate(
            input_ids=sglang_job.PROMPTS[2], sampling_params=params, lora_path=NAME, stream=True
        )
        ids: list[int] = []
        async for one in stream:
            ids, begun[0] = one["output_ids"], begun[0] + 1
        return ids

    async def run() -> dict[str, Any]:
        asked, met = [], 0
        for version in range(versions):
            answer = await sending(engine, folders[version % len(folders)])
            assert answer.success, answer
            met += bool(asked and not asked[-1].done())
            seen, one = begun[0], asyncio.create_task(ask())
            asked.append(one)
            while begun[0] == seen and not one.done():
                await asyncio.sleep(0.002)
        return dict(ids=[await one for one in asked], met=met)

    return _wait(engine, run())


def greedy(engine: Any, count: int = 48) -> list[int]:
    """The tokens of the request that `across` makes."""
    import sglang_job

    params = dict(temperature=0, max_new_tokens=count, ignore_eos=True)
    asked = dict(input_ids=sglang_job.PROMPTS[2], sampling_params=params, lora_path=NAME)
    return engine.generate(**asked)["output_ids"]


def under(engine: Any, name: str = NAME) -> Any:
    """`answers` under an adapter, or how they fail."""
    import sglang_job

    plain = engine.generate
    engine.generate = lambda **kw: plain(lora_path=name, **kw)
    try:
        return sglang_job.answers(engine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del engine.generate


def _wait(engine: Any, answer: Any) -> Any:
    return engine.loop.run_until_complete(answer)


def break_rank(file: str) -> None:
    """Let the second rank fail on the next adapter that it reads whenever ``file`` is there, which goes with it."""
    from sglang.srt.lora.lora import LoRAAdapter

    plain = LoRAAdapter._process_weight

    def process(self, name: str, loaded_weight: Any) -> None:
        import torch

        if Path(file).exists() and torch.distributed.get_rank() == 1:
            Path(file).unlink()
            raise OSError("rank 1 lost it")
        plain(self, name, loaded_weight)

    LoRAAdapter._process_weight = process


def fault(engine: Any, file: str) -> None:
    """Let the second rank fail on the next adapter, see `break_rank`."""
    Path(file).touch()
