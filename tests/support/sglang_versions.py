"""Ask SGLang which version of the policy gave its tokens: steps of `sglang_job`."""

import asyncio
from typing import Any


def versions(engine: Any) -> list[Any]:
    """The version that answers are stamped with: by the tokenizer's process, and token by token by the scheduler's."""
    import sglang_job

    info = engine.generate(
        input_ids=sglang_job.PROMPTS[2], sampling_params=dict(temperature=0, max_new_tokens=2)
    )["meta_info"]
    own = getattr(engine.tokenizer_manager, "config_value", info.get)  # before 0.5.17 answers have it alone
    return [
        own("weight_version"),
        [[s["version"], s["start"], s["end"]] for s in info.get("weight_versions", ())],
    ]


def across(engine: Any, source: str, version: str) -> dict[str, Any]:
    """An update while a request is retracted: SGLang's spans of its tokens, how many there were then, and the answers."""
    import sglang_job
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    seen: list[Any] = []

    async def ask() -> None:
        stream = await engine.async_generate(
            input_ids=sglang_job.PROMPTS[2],
            sampling_params=dict(temperature=0, max_new_tokens=64, ignore_eos=True),
            stream=True,
        )
        async for one in stream:
            seen.append(one)

    async def paused() -> asyncio.Task[None]:
        asked = asyncio.create_task(ask())
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        return asked

    async def ended(asked: asyncio.Task[None]) -> None:
        await engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
        await asked

    asked = engine.loop.run_until_complete(paused())
    answers = sglang_job.update(engine, source, "split", version=version)
    before = len(seen[-1]["output_ids"])
    engine.loop.run_until_complete(ended(asked))
    info = seen[-1]["meta_info"]
    spans = [[s["version"], s["start"], s["end"]] for s in info["weight_versions"]]
    return dict(answers=answers, before=before, spans=spans, last=info["weight_version"])
