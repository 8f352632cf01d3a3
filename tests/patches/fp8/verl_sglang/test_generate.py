"""Samples of verl's SGLang server that verl would drop in silence: raised by name."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl_sglang import http_server

pytestmark = [pytest.mark.verl, pytest.mark.sglang]

ASKED = dict(logprobs=True, max_new_tokens=8)


@pytest.fixture(autouse=True)
def one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.mismatch, "note_precision", lambda output, replica: None)


def generate(tokens: list[int], stop: str, settings: dict[str, Any], error: Exception | None = None) -> Any:
    """What verl's server returns when SGLang gave this, through the patch."""
    output = SimpleNamespace(token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason=stop)

    async def original(self, prompt, settings):
        settings.pop("logprobs", None)  # as verl's does
        if error is not None:
            raise error
        return output

    return asyncio.run(http_server.generate(original, SimpleNamespace(replica_rank=0), [1], dict(settings)))


def test_an_empty_answer_in_place_of_a_sample_is_an_error() -> None:
    with pytest.raises(PatchError, match=r"fp8\.verl_sglang\.generate.*another number of log-probabilities"):
        generate([], "length", ASKED)


@pytest.mark.parametrize(
    "tokens, stop, settings",
    [
        ([5, 6], "length", ASKED),
        ([], "abort", ASKED),
        ([], "length", {**ASKED, "max_new_tokens": 0}),
        ([], "stop", {}),
    ],
)
def test_what_verl_returns_rightly_passes(tokens: list[int], stop: str, settings: dict[str, Any]) -> None:
    assert generate(tokens, stop, settings).token_ids == tokens


def test_a_refused_request_is_an_error_that_ray_can_pass_on() -> None:
    from fastapi import HTTPException

    with pytest.raises(PatchError, match=r"status 503.*half-updated"):
        generate([], "", ASKED, HTTPException(503, "half-updated"))
