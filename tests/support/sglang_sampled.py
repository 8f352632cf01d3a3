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
