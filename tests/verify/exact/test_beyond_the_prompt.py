"""What no token of the prompt reads is compared too: rows of embeddings, learned positions; or it is said that it is not."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from exact_faults import passed

from flashpatch.verify.exact.certificate import Certificate
from flashpatch.verify.exact.compare import compare

IDS = torch.randint(512, (48,), generator=torch.Generator().manual_seed(0)).tolist()
SMALL = dict(vocab_size=512, initializer_range=0.3)
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
)
LLAMA = transformers.LlamaConfig(**SMALL, **SIZES, tie_word_embeddings=False)
GPT2 = transformers.GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=128)


def model_of(config: Any) -> torch.nn.Module:
    """With weights that bf16 holds."""
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.float().eval()


def certified(config: Any, fault: Callable[[Any], None] = lambda engine: None) -> Certificate:
    """The certificate of a model in bf16 with a fault."""
    model = model_of(config)
    engine = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        fault(engine)
    return compare(lambda dtype: copy.deepcopy(model).to(dtype), IDS, passed(engine, IDS))


def test_a_row_of_an_embedding_that_no_token_reads_is_compared() -> None:
    unread = [token for token in range(512) if token not in IDS]

    def one(engine: Any) -> None:
        engine.model.embed_tokens.weight[unread[7]] *= 1.1

    def others(engine: Any) -> None:
        weight = engine.model.embed_tokens.weight
        weight[unread] = weight[unread].roll(1, 0)

    assert certified(LLAMA).agrees
    assert str(certified(LLAMA, one).first) == f"model.embed_tokens, row {unread[7]}"
    first = str(certified(LLAMA, others).first)
    assert first == f"model.embed_tokens, {len(unread)} of 512 rows, the first {unread[0]}"


def test_positions_that_the_prompt_does_not_reach_are_compared() -> None:
    def later(engine: Any) -> None:
        weight = engine.transformer.wpe.weight
        weight[48:] = weight[48:].roll(1, 0)

    assert certified(GPT2).agrees
    assert str(certified(GPT2, later).first) == "transformer.wpe, 80 of 128 rows, the first 48"


def test_rows_that_an_engine_does_not_give_and_windows_that_are_not_filled_are_not_compared() -> None:
    model = model_of(LLAMA)
    seen = dataclasses.replace(passed(model, IDS), rows={}, also=())
    found = compare(lambda dtype: copy.deepcopy(model).to(dtype), IDS, seen)
    assert found.agrees and not found.ok
    far = "rotary positions beyond the prompt, of which the engine has no table like the trainer's"
    rows = "model.embed_tokens's rows that no token reads"
    assert found.not_compared == ("decode steps", "steps of several sequences", far, rows)

    def windows(window: int) -> list[str]:
        config = transformers.MistralConfig(**SMALL, **SIZES, sliding_window=window)
        return [one for one in certified(config).not_compared if "window" in one]

    assert windows(1100) == ["the window of 1100 tokens (sliding_window), which the prompt's 48 do not fill"]
    assert not windows(40)
