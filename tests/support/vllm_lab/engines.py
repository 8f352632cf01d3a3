"""Open a real vLLM engine on a tiny model, ask it everything, compare two sets of answers.

vLLM and numpy are imported by the functions: a test file imports this module where neither is installed."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_lab import imported
from vllm_lab.models import VOCAB

if TYPE_CHECKING:
    import numpy

DEFAULTS: Mapping[str, Any] = dict(
    dtype="bfloat16",
    max_model_len=256,
    max_num_seqs=8,
    enforce_eager=True,
    enable_prefix_caching=False,
    kv_cache_memory_bytes=16 << 20,
    max_logprobs=-1,
    disable_log_stats=True,
)

#: How many each continuation has, if a test asks for no other number.
TOKENS = 8

#: Four prompts that hold every token id once: no row of the embedding goes unseen.
PROMPTS: tuple[tuple[int, ...], ...] = tuple(tuple(range(start, VOCAB, 4)) for start in range(4))


@contextlib.contextmanager
def open_llm(
    model: str | os.PathLike[str], *, processes: bool = False, fork: bool = False, **kw: Any
) -> Iterator[Any]:
    """A `vllm.LLM` on `model`, shut down at the end. `kw` adds to DEFAULTS.

    `processes=True` puts EngineCore and the worker in processes of their own. tensor_parallel_size=n has n
    worker processes anyway; each gets one CPU. `fork=True` forks all of these: see `forked`."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    imported.spare()
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "01"[processes]}
    if (ranks := kw.get("tensor_parallel_size", 1)) > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    try:
        with _environment(variables), forked() if fork else contextlib.nullcontext():
            llm = LLM(model=str(model), **{**DEFAULTS, **kw})
    except BaseException:
        cleanup_dist_env_and_memory()  # so that the next engine of this interpreter can start
        raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Let vLLM fork engine cores, workers and the coordinator of a data-parallel group, as it does on a GPU; on a CPU each of
    them would import it anew."""
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    chosen = [(module, module.get_mp_context) for module in (coordinator, utils, multiproc_executor)]
    for module, _ in chosen:
        module.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    try:
        yield
    finally:
        for module, original in chosen:
            module.get_mp_context = original


def answers(llm: Any, tokens: int = TOKENS) -> dict[str, Any]:
    """What the engine says to PROMPTS: JSON data, exact.

    prompt_logprobs: float32 [prompts * (length - 1), VOCAB]; logprobs: [prompts * tokens, VOCAB] of the
    greedy continuation, whose ids are `tokens` [prompts][tokens]. Arrays are base64: `array()` reads them."""
    outputs = _generate(llm, tokens, prompt_logprobs=-1, logprobs=-1, flat_logprobs=True)
    return dict(
        prompt_logprobs=_text([_dense(output.prompt_logprobs, skip=1) for output in outputs]),
        logprobs=_text([_dense(output.outputs[0].logprobs) for output in outputs]),
        tokens=[tokens_of(output) for output in outputs],
    )


def greedy(llm: Any, tokens: int = TOKENS) -> list[list[int]]:
    """Only the greedy continuations: the quick question, and the one that uses the prefix cache."""
    return [tokens_of(output) for output in _generate(llm, tokens)]


def _generate(llm: Any, tokens: int, **more: Any) -> list[Any]:
    """One prompt at a time: an engine in another process batches whatever has arrived, and where activations
    share one scale (fp8 per tensor) a prompt's answer depends on its company."""
    asked = sampling(tokens, **more)
    return [llm.generate({"prompt_token_ids": list(prompt)}, asked, use_tqdm=False)[0] for prompt in PROMPTS]


def sampling(tokens: int = TOKENS, **more: Any) -> Any:
    """vLLM's parameters of a greedy continuation of so many tokens, or of what ``more`` makes of it."""
    from vllm import SamplingParams

    greedily = dict(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return SamplingParams(**{**greedily, **more})


def add(
    llm: Any,
    name: str,
    prompt: Iterable[int] = PROMPTS[0],
    tokens: int = TOKENS,
    lora: Any = None,
    **more: Any,
) -> None:
    """Give a request to an engine that `step` and `ended` drive."""
    asked = {"prompt_token_ids": list(prompt)}
    llm.llm_engine.add_request(name, asked, sampling(tokens, **more), lora_request=lora)


def step(llm: Any, times: int = 1) -> dict[str, Any]:
    """Step so often; the outputs of requests that have ended meanwhile, by name."""
    outputs = [output for _ in range(times) for output in llm.llm_engine.step()]
    return {output.request_id: output for output in outputs if output.finished}


def ended(llm: Any) -> dict[str, Any]:
    """Step until no request is left; the outputs of those that have ended, by name."""
    found: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        found |= step(llm)
    return found


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def array(text: str) -> numpy.ndarray:
    """The float32 array [rows, VOCAB] behind a field of `answers`."""
    import numpy

    return numpy.frombuffer(base64.b64decode(text), dtype=numpy.float32).reshape(-1, VOCAB)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Between two answers: over all logprobs (NaN apart), and in greedy tokens. `exact` is the goal."""

    largest: float
    mean: float
    nan: int
    tokens: int

    @property
    def exact(self) -> bool:
        return self == Difference(0.0, 0.0, 0, 0)


def difference(left: Mapping[str, Any], right: Mapping[str, Any], forced: bool = False) -> Difference:
    """How far apart two `answers` are; `nan` counts the positions where either side is NaN.

    ``forced``: over the prompts alone, whose tokens are given. Another computation than a fresh engine's rounds otherwise, may
    draw another token, and what follows that is an answer to another text."""
    import numpy

    keys = ("prompt_logprobs",) if forced else ("prompt_logprobs", "logprobs")
    a, b = (
        numpy.concatenate([array(one[key]) for key in keys]).astype(numpy.float64) for one in (left, right)
    )
    nan = numpy.isnan(a) | numpy.isnan(b)
    gaps = numpy.abs(a[~nan] - b[~nan])
    tokens = sum(
        x != y
        for one, other in zip(left["tokens"], right["tokens"], strict=True)
        for x, y in zip(one, other, strict=True)
    )
    return Difference(
        float(gaps.max(initial=0.0)), float(gaps.mean()) if gaps.size else 0.0, int(nan.sum()), tokens
    )


def inner_runner(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def inner_model(llm: Any) -> Any:
    """The torch module of an in-process engine."""
    return inner_runner(llm).model


def weight_version(core: Any) -> str:
    """Return what an engine core calls its weights: vLLM's own word, before 0.27 the one that FlashPatch keeps."""
    if hasattr(core, "get_weight_version"):
        return core.get_weight_version()
    from flashpatch.patches.fp8.vllm import engine_core

    return engine_core.gates[core].weight_version or "default"


def addresses(model: Any) -> dict[str, tuple[int, int]]:
    """name -> (id of the object, address of its data), for every parameter and buffer, aliases included."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in named}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _dense(flat: Any, skip: int = 0) -> numpy.ndarray:
    """vLLM's flat logprobs as float32 [positions, VOCAB]; the first prompt position has none."""
    import numpy

    rows = numpy.full((len(flat.start_indices) - skip, VOCAB), numpy.nan, dtype=numpy.float32)
    ids, values = numpy.asarray(flat.token_ids), numpy.asarray(flat.logprobs, dtype=numpy.float32)
    for row, start, end in zip(rows, flat.start_indices[skip:], flat.end_indices[skip:], strict=True):
        row[ids[start:end]] = values[start:end]
    return rows


def _text(rows: list[numpy.ndarray]) -> str:
    import numpy

    return base64.b64encode(numpy.concatenate(rows).tobytes()).decode()


def schedule_a_step_ahead() -> None:
    """Let this process's vLLM schedule as on a GPU; its platform for CPUs says that this is not required."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def changed(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(changed)
