"""Sampled continuations of a running SGLang engine: steps of sglang_job.py."""

from typing import Any


def sampled(
    engine: Any, times: int, count: int, prompt: list[int], greedy: int = 0, **params: Any
) -> list[dict[str, Any]]:
    """Continuations of one prompt, ``times`` sampled and then ``greedy`` greedy ones, in common batches.

    Token ids, the log-probability of each, and, under speculation, how many were accepted per step."""
    common = dict(max_new_tokens=count, ignore_eos=True)
    outputs = engine.generate(
        input_ids=[prompt] * (times + greedy),
        sampling_params=[dict(common, **params)] * times + [dict(common, temperature=0)] * greedy,
        return_logprob=True,
    )
    return [
        dict(
            ids=output["output_ids"],
            logprobs=[one[0] for one in output["meta_info"]["output_token_logprobs"]],
            accept=output["meta_info"].get("spec_accept_length"),
        )
        for output in outputs
    ]


def kept(engine: Any, prompt: list[int], settings: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """A continuation of a prompt per sampling setting, the way that verl's server asks for it.

    Token ids, SGLang's log-probability of each, and of those that came with kept ids: over these, and the ids."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from flashpatch.patches.fp8.sglang.kept_tokens import HELD

    async def ask(params: dict[str, Any]) -> dict[str, Any]:
        held: list[Any] = []
        HELD.set(held)
        params = dict(params, max_new_tokens=count, ignore_eos=True)
        asked = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        output = await engine.tokenizer_manager.generate_request(asked, None).__anext__()
        return dict(
            ids=output["output_ids"],
            whole=[one[0] for one in output["meta_info"]["output_token_logprobs"]],
            over_kept=[float(one) for one in held],
            kept=[one.kept.tolist() for one in held],
        )

    return [engine.loop.run_until_complete(ask(one)) for one in settings]
