"""The experts that SGLang returns as text can be read as verl reads them, and stay the text that they are."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy
import pytest

from flashpatch.patches.grpo.replay.actor import generate_request

EXPERTS = numpy.arange(12, dtype=numpy.int32).reshape(2, 3, 2)  # two tokens, three layers, two experts each
TEXT = base64.b64encode(EXPERTS.tobytes()).decode()
MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=2))
)


def returned(output: object, asked: bool) -> object:
    """What a request gets first."""

    async def original(self, obj, request=None):
        yield output

    async def first():
        obj = SimpleNamespace(return_routed_experts=asked)
        return await generate_request(original, MANAGER, obj, None).__anext__()

    return asyncio.run(first())


def test_what_was_asked_for_is_an_array_for_verl_and_text_for_others() -> None:
    found = returned({"meta_info": {"routed_experts": TEXT}}, asked=True)["meta_info"]["routed_experts"]
    assert found == TEXT and json.dumps(found) == json.dumps(TEXT)
    assert (found.numpy() == EXPERTS).all() and found.numpy().shape == EXPERTS.shape


@pytest.mark.parametrize("output", [{"meta_info": {}}, {"meta_info": {"routed_experts": None}}, ["a batch"]])
def test_an_output_without_experts_stays_as_it_is(output: object) -> None:
    assert returned(output, asked=True) is output


def test_a_request_that_asks_for_none_is_left_alone() -> None:
    output = {"meta_info": {"routed_experts": TEXT}}
    assert type(returned(output, asked=False)["meta_info"]["routed_experts"]) is str
