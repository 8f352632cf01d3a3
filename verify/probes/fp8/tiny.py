"""Write a tiny random model, open an engine on it, and collect the engine's answers.

Run as a script, by its path, it is the reference: an engine without FlashPatch.

    python tiny.py MODEL KEYWORDS ANSWERS

waits for the file ``KEYWORDS`` (JSON: of ``vllm.LLM``, such as the name of a quantization), opens ``MODEL`` with
them and saves the `answers` as ``ANSWERS``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

VOCAB = 512
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 256, 512, 2, 4, 2

#: Every token id occurs; long enough that a whole block of the prefix cache is kept.
_PROMPTS = tuple(list(range(start, VOCAB, 3)) for start in range(3))
_TOKENS = 8
_TIMEOUT = 240.0  # seconds the script waits for its engine arguments

#: Variables with which a tiny engine starts quickly and gives the same answers in any process.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def write(directory: Path, seed: int) -> Path:
    """Make ``directory`` a Hugging Face checkpoint of a random Qwen2; two seeds share no value.

    Norms and biases are random too, and all of it is wide enough that any tensor shows in the answers.
    """
    import numpy
    from safetensors.numpy import save_file

    noise = numpy.random.default_rng(seed)

    def random(*shape: int, around: float = 0.0) -> numpy.ndarray:
        return around + 0.08 * noise.standard_normal(shape, dtype=numpy.float32)

    kv = _HIDDEN // _HEADS * _KV_HEADS
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, _HIDDEN),
        "model.norm.weight": random(_HIDDEN, around=1.0),
        "lm_head.weight": random(VOCAB, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = random(_HIDDEN, around=1.0)
        for name, rows in (("q", _HIDDEN), ("k", kv), ("v", kv)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = random(rows, _HIDDEN)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = random(rows)
        tensors[f"{at}.self_attn.o_proj.weight"] = random(_HIDDEN, _HIDDEN)
        for name, rows, columns in (
            ("gate", _INNER, _HIDDEN),
            ("up", _INNER, _HIDDEN),
            ("down", _HIDDEN, _INNER),
        ):
            tensors[f"{at}.mlp.{name}_proj.weight"] = random(rows, columns)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config()))
    return directory


def round_to_int8(source: Path, directory: Path, description: dict[str, Any]) -> Path:
    """Make ``directory`` the int8 checkpoint of the one in ``source``: a scale per row of each linear layer.

    Args:
        description: its ``quantization_config``.
    """
    import numpy
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = numpy.abs(tensors[name]).max(1, keepdims=True) / numpy.float32(127)
        tensors[name] = numpy.rint(tensors[name] / scale).astype(numpy.int8)
        tensors[f"{name}_scale"] = scale
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**_config(), "quantization_config": description}))
    return directory


def engine_arguments(model: str, **more: Any) -> dict[str, Any]:
    """Keywords of ``vllm.LLM`` and ``vllm.EngineArgs``: small, eager, prefix caching, no tokenizer."""
    return dict(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=32 << 20,
        gpu_memory_utilization=0.3,
        max_logprobs=-1,
        disable_log_stats=True,
        **more,
    )


def register_model() -> None:
    """Register the model's class, or vLLM inspects it in a process that imports vLLM anew, unless cached."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    ModelRegistry.register_model("Qwen2ForCausalLM", Qwen2ForCausalLM)


def answers(llm: Any, prompts: int = len(_PROMPTS)) -> numpy.ndarray:
    """Return float32 [positions, VOCAB]: logprobs of the first ``prompts`` prompts, each followed by those of a
    greedy continuation that may use the prefix cache. Requests run one at a time, so that batches are the same in
    every process."""
    import numpy
    from vllm import SamplingParams

    greedy = dict(temperature=0, ignore_eos=True, detokenize=False, flat_logprobs=True)
    rows = []
    for prompt in _PROMPTS[:prompts]:
        [scored] = _ask(llm, prompt, SamplingParams(max_tokens=1, prompt_logprobs=-1, **greedy))
        rows.append(_dense(scored.prompt_logprobs)[1:])
        [continued] = _ask(llm, prompt, SamplingParams(max_tokens=_TOKENS, logprobs=-1, **greedy))
        rows.append(_dense(continued.outputs[0].logprobs))
    return numpy.concatenate(rows)


def version_spans(llm: Any) -> list[list[Any]] | None:
    """Return version, start and end of each span of an answer's tokens as vLLM itself tells them; None before 0.32."""
    from vllm import SamplingParams

    [answer] = _ask(
        llm, _PROMPTS[0], SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    )
    spans = getattr(answer.outputs[0], "weight_versions", None)
    return None if spans is None else [[span.version, span.start, span.end] for span in spans]


def _ask(llm: Any, prompt: list[int], sampling: Any) -> Any:
    return llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)


def _dense(flat: Any) -> numpy.ndarray:
    """vLLM's ``FlatLogprobs`` as float32 [positions, VOCAB]; NaN if there is no logprob."""
    import numpy

    rows = numpy.full((len(flat.start_indices), VOCAB), numpy.nan, dtype=numpy.float32)
    ids, values = numpy.asarray(flat.token_ids), numpy.asarray(flat.logprobs, dtype=numpy.float32)
    for row, start, end in zip(rows, flat.start_indices, flat.end_indices, strict=True):
        row[ids[start:end]] = values[start:end]
    return rows


def _config() -> dict[str, Any]:
    return dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )


def _main(model: Path, keywords: Path, saved: Path) -> None:
    import numpy
    from vllm import LLM
    from vllm.platforms import current_platform

    deadline = time.monotonic() + _TIMEOUT
    while not keywords.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no process wrote {keywords}")
        time.sleep(0.1)
    if current_platform.is_cpu():
        from flashpatch.patches.fp8.vllm import cpu_kernels

        cpu_kernels.use()
    register_model()
    llm = LLM(**engine_arguments(str(model), **json.loads(keywords.read_text())))
    found = answers(llm)
    engine = sys.modules.get("flashpatch.engine")
    if engine is not None and engine.manager.selection.choices:
        raise RuntimeError("this engine is not independent: FlashPatch is in its process")
    with saved.open("wb") as file:
        numpy.save(file, found)
    os._exit(0)  # vLLM's shutdown takes seconds


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
