"""Open a tiny vLLM engine, update it and collect its answers: the standard job of probes on vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.answers import PROMPTS, TOKENS, buckets

NAME, ENTRY, RELOAD = "vllm", "LLM", "reload_weights"

ENVIRONMENT = jobs.given()["vllm_variables"]
IN_ONE = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
APART = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def arguments(model: str | Path, **more: Any) -> dict[str, Any]:
    """Return keywords of ``vllm.LLM`` and ``vllm.EngineArgs``: small, eager, prefix caching, no tokenizer."""
    return {"model": str(model), **jobs.given()["vllm"], **more}


def register_model() -> None:
    """Register the model's class, or vLLM inspects it in a process that imports vLLM anew, unless cached."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    ModelRegistry.register_model("Qwen2ForCausalLM", Qwen2ForCausalLM)


class Extension:
    """Joined to the worker's class by vLLM's own ``worker_extension_cls``, as verl does; called by name."""

    def flashpatch_probe_look(self) -> dict[str, Any]:
        """Return the dtype and address of every parameter and buffer, and the kernels."""
        from flashpatch.patches.fp8.precision.quantize_on_load import kernels

        model = self.get_model()
        named = [*model.named_parameters(remove_duplicate=False)]
        named += model.named_buffers(remove_duplicate=False)
        tensors = {
            name: {"at": [id(tensor), tensor.data_ptr()], "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in named
        }
        return {"tensors": tensors, "kernels": kernels(model)}

    def flashpatch_probe_load(self, checkpoint: str, finish: bool, wrapped: bool) -> None:
        """Stream a checkpoint into ``model.load_weights`` in buckets that cut every fused layer.

        With ``finish``, post-process at the end as verl's receiver does; else the engine must do it by itself. With
        ``wrapped``, layers have the names that verl gives those with adapters."""
        model, own = self.get_model(), "_proj.base_layer." if wrapped else "_proj."
        for bucket in buckets(checkpoint):
            model.load_weights((name.replace("_proj.", own), weight) for name, weight in bucket)
        if finish:
            from vllm.model_executor.model_loader.utils import process_weights_after_loading

            process_weights_after_loading(model, self.model_config, self.device)


class Engine:
    """A ``vllm.LLM``; ``stock`` if it has the kernels of FlashPatch and nothing else of it."""

    def __init__(self, model: Path, adapters: int = 0, stock: bool = False, **more: Any) -> None:
        from packaging.version import Version
        from vllm import LLM, __version__

        from flashpatch.patches.fp8.vllm import cpu_kernels

        if stock:
            cpu_kernels.use()
            register_model()
        if adapters:
            more |= dict(enable_lora=True, max_loras=adapters, max_lora_rank=8)
        extension = f"{__name__}.{Extension.__name__}"
        self.llm = LLM(**arguments(model, worker_extension_cls=extension, **more))
        self._wrapped = bool(adapters) and Version(__version__) < Version("0.28")  # plain names fail before
        self._adapters: dict[str, Any] = {}

    def precision(self) -> Mapping[str, Any]:
        """Return the keywords with which stock vLLM opens a checkpoint in this engine's precision."""
        config = self.llm.llm_engine.vllm_config.model_config
        given = config.hf_overrides if isinstance(config.hf_overrides, dict) else {}
        overrides = {key: value for key, value in given.items() if key != "quantization_config"}
        return {"quantization": config.quantization, "hf_overrides": overrides}

    def update(self, checkpoint: Path, finish: bool) -> None:
        """Send a checkpoint in buckets; ``finish`` as verl's receiver does."""
        self.llm.collective_rpc("flashpatch_probe_load", args=(str(checkpoint), finish, self._wrapped))

    def reload(self, checkpoint: Path) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter under a name, in place of the one that has it."""
        from vllm.lora.request import LoRARequest

        number = len({*self._adapters} - {name}) + 1
        request = LoRARequest(name, number, str(folder), load_inplace=True)
        self.llm.llm_engine.add_lora(request)
        self._adapters[name] = request

    def answers(self, adapter: str = "") -> list[list[float]]:
        """Return what `answers` does, under an adapter if one is named."""
        return answers(self.llm, adapter=self._adapters.get(adapter))

    def generate(
        self, prompts: list[list[int]], asked: list[dict[str, Any]], tokens: int
    ) -> list[dict[str, Any]]:
        """Return so many tokens and their logprobs for each prompt of a batch, sampled as is asked for each."""
        given = [dict(one, max_tokens=tokens, logprobs=0) for one in asked]
        got = [one.outputs[0] for one in _ask(self.llm, prompts, *given)]
        return [dict(tokens=[*one.token_ids], logprobs=_logprobs(one.token_ids, one.logprobs)) for one in got]

    def call(self, method: str, *given: Any) -> Any:
        """Return what the first worker answers to a command of FlashPatch."""
        return self.llm.collective_rpc(method, args=given)[0]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def look(self) -> dict[str, Any]:
        """Return what the worker has in memory, and vLLM's own version spans of an answer; None before 0.32."""
        [found] = self.llm.collective_rpc("flashpatch_probe_look")
        [output] = _ask(self.llm, PROMPTS[:1], dict(max_tokens=TOKENS))
        spans = getattr(output.outputs[0], "weight_versions", None)
        return {**found, "spans": spans and [[span.version, span.start, span.end] for span in spans]}


def answers(llm: Any, prompts: Sequence[list[int]] = PROMPTS, adapter: Any = None) -> list[list[float]]:
    """Return per prompt the logprobs of its tokens, then those of a greedy continuation that may use the prefix cache.

    Requests run one at a time, so that batches are the same in every process."""
    rows = []
    for prompt in prompts:
        [scored] = _ask(llm, [prompt], dict(max_tokens=1, prompt_logprobs=0), adapter=adapter)
        [output] = _ask(llm, [prompt], dict(max_tokens=TOKENS, logprobs=0), adapter=adapter)
        continued = output.outputs[0]
        read = _logprobs(prompt[1:], scored.prompt_logprobs[1:])
        rows.append(read + _logprobs(continued.token_ids, continued.logprobs))
    return rows


def _ask(llm: Any, prompts: Sequence[list[int]], *asked: dict[str, Any], adapter: Any = None) -> Any:
    from vllm import SamplingParams

    plain = dict(temperature=0, ignore_eos=True, detokenize=False)
    texts = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = [SamplingParams(**{**plain, **one}) for one in asked]
    return llm.generate(texts, sampling, use_tqdm=False, lora_request=adapter)


def _logprobs(tokens: Sequence[int], rows: Any) -> list[float]:
    return [row[token].logprob for token, row in zip(tokens, rows, strict=True)]
