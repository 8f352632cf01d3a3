"""Keep the tokens of running requests outside the servers that generate them, so that another server can go on: what holds
them, what goes on from them, and what reports them from verl's vLLM server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import holding

NAME = "flashpatch_grpo_journal"
"""Name of the Ray actor that holds a job's `Journal`."""

RESUMED = "flashpatch_resumed"
"""Key among a response's extra fields: versions and lengths of what lost servers generated, ``[[version, tokens]]``."""

MOST = 65_536
"""Requests kept at once; beyond, the oldest are forgotten, and would start again from their prompts."""

_RESUMABLE = frozenset(
    "max_tokens max_new_tokens temperature top_p top_k min_p logprobs repetition_penalty ignore_eos stop_token_ids "
    "skip_special_tokens spaces_between_special_tokens detokenize".split()
)
"""Sampling parameters under which the rest of a response is sampled as if its beginning were generated here."""


class Journal:
    """Hold what each running request has generated, by the id that its server knows it by."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()  # of which a server may still report tokens

    def add(
        self,
        request: str,
        start: int,
        tokens: list[int],
        logprobs: list[float] | None,
        version: int | None,
        stop_reason: str | None = None,
    ) -> None:
        """Add generated tokens.

        Args:
            request: the server's id of the request.
            start: how many tokens came before these; what does not follow the tokens held is dropped, and what comes
                of a request that was taken or forgotten.
            tokens: token ids.
            logprobs: their log-probabilities, or None if the request asks for none.
            version: of the policy that generated them.
            stop_reason: why the response ends with them, in verl's words; None: it goes on.
        """
        entry = self._entries.get(request)
        if request in self._closed or start != (len(entry["tokens"]) if entry else 0):
            return
        if entry is None:
            entry = {"tokens": [], "logprobs": [], "versions": [], "stop_reason": None}
            self._entries[request] = entry
            _bound(self._entries)
        entry["tokens"] += tokens
        entry["logprobs"] += logprobs or []
        entry["stop_reason"] = stop_reason
        add_version(entry["versions"], version, len(tokens))

    def take(self, request: str) -> dict[str, Any] | None:
        """Return and forget what a request generated: tokens, logprobs, versions and stop_reason; None if nothing."""
        self._closed[request] = None
        _bound(self._closed)
        return self._entries.pop(request, None)

    def forget(self, request: str) -> None:
        """Forget a request that was answered."""
        self.take(request)

    def size(self) -> int:
        """Return how many requests are held."""
        return len(self._entries)


def _bound(kept: OrderedDict[str, Any]) -> None:
    while len(kept) > MOST:
        kept.popitem(last=False)


def add_version(parts: list[list[Any]], version: int | None, tokens: int) -> None:
    """Add generated tokens to a response's ``[version, tokens]``; one version's tokens in a row are one part."""
    if parts and parts[-1][0] == version:
        parts[-1][1] += tokens
    else:
        parts.append([version, tokens])


def start() -> Any:
    """Make the job's journal, an actor of Ray owned by this process; return its handle, which keeps it alive."""
    import ray

    return ray.remote(Journal).options(name=NAME, get_if_exists=True, num_cpus=0).remote()


def find() -> Any | None:
    """Return the handle of the job's journal, or None if there is none."""
    import ray

    try:
        return ray.get_actor(NAME)
    except ValueError:
        return None


class Beginning:
    """Hold what lost servers generated of one response, and what is asked of the next one.

    Args:
        arguments: keywords of verl's ``LLMServerClient.generate``.
        rollout: verl's rollout configuration, for the limit of a request that names none.
    """

    def __init__(self, arguments: Mapping[str, Any], rollout: Any) -> None:
        self._arguments = dict(arguments)
        self._limit = _limit(arguments, rollout)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[list[Any]] = []
        self._stop_reason: str | None = None

    @property
    def resumable(self) -> bool:
        """Whether the rest of the response can be sampled elsewhere as it would have been."""
        asked = self._arguments.get("sampling_params") or {}
        media = any(self._arguments.get(name) for name in ("image_data", "video_data", "audio_data"))
        return self._limit is not None and not media and _RESUMABLE >= asked.keys()

    @property
    def tokens(self) -> int:
        """Return how many tokens are there already."""
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        """Whether the response is complete, and only the answer was lost."""
        return self._stop_reason is not None or (self._limit is not None and self.tokens >= self._limit)

    def add(self, found: Mapping[str, Any] | None) -> None:
        """Add what `Journal.take` returned of an attempt that was lost."""
        if not found:
            return
        self._tokens += found["tokens"]
        self._logprobs += found["logprobs"]
        for version, tokens in found["versions"]:
            add_version(self._versions, version, tokens)
        self._stop_reason = found["stop_reason"]

    def rest(self) -> dict[str, Any]:
        """Return the keywords that ask for the rest: the tokens follow the prompt, and count against the limit."""
        if not self._tokens or self._limit is None:
            return self._arguments
        asked = dict(self._arguments["sampling_params"])
        asked.pop("max_new_tokens", None)
        asked["max_tokens"] = self._limit - self.tokens
        prompt = [*map(int, self._arguments["prompt_ids"]), *self._tokens]
        return {**self._arguments, "prompt_ids": prompt, "sampling_params": asked}

    def joined(self, output: Any) -> Any:
        """Put what is there already in front of a server's answer; return the answer."""
        if not self._tokens:
            return output
        output.token_ids = [*self._tokens, *output.token_ids]
        if output.log_probs is not None:
            output.log_probs = [*self._logprobs, *output.log_probs]
        output.extra_fields[RESUMED] = self._versions
        output.extra_fields["min_global_steps"] = self._versions[0][0]
        return output

    def whole(self) -> Any:
        """Return the complete response as verl's ``TokenOutput``."""
        from verl.workers.rollout.replica import TokenOutput

        newest = self._versions[-1][0]
        steps = {"global_steps": newest, "min_global_steps": self._versions[0][0], "max_global_steps": newest}
        return TokenOutput(
            token_ids=self._tokens,
            log_probs=self._logprobs if (self._arguments["sampling_params"] or {}).get("logprobs") else None,
            stop_reason=self._stop_reason or "completed",
            num_preempted=0,
            extra_fields={**steps, RESUMED: self._versions},
        )


def _limit(arguments: Mapping[str, Any], rollout: Any) -> int | None:
    """Return how many tokens the response may have, as verl's server works it out; None if that is not known."""
    asked = arguments.get("sampling_params") or {}
    for name in ("max_tokens", "max_new_tokens"):
        if asked.get(name) is not None:
            return int(asked[name])
    response, prompt = getattr(rollout, "response_length", None), getattr(rollout, "prompt_length", None)
    if response is None or prompt is None:
        return None
    return int(min(response, prompt + response - len(arguments["prompt_ids"])))


_server: ContextVar[Any] = ContextVar("flashpatch_grpo_server", default=None)
"""verl's server whose request is being handed to the engine."""
_WHY = (
    "When a rollout server dies, what it had generated is lost: its requests begin again from their prompts."
)

verl_patches = Patches(
    "grpo",
    "verl>=0.9",
    framework="verl_vllm",
    scope="driver",
    evidence="optional",
    why=_WHY,
    remove_when="verl keeps the tokens of running requests outside the server.",
)


@verl_patches.wrap(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
    id="grpo.verl_vllm.generate",
    params=("prompt_ids", "sampling_params", "request_id"),
    relies_on=("self.engine.generate", "self.global_steps"),
)
async def server_generate(original, self, *args: Any, **arguments: Any) -> Any:
    """Note which server a request belongs to, for grpo.vllm.generate."""
    with holding(_server, self):
        return await original(self, *args, **arguments)


@Patches("grpo", "vllm>=0.24", scope="driver", evidence="optional").wrap(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    id="grpo.vllm.generate",
    why=_WHY,
    remove_when="verl keeps the tokens of running requests outside the server.",
)
def engine_generate(
    original, self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
) -> AsyncIterator[Any]:
    """Report tokens to an actor of Ray outside the server while they come, with the option journal."""
    outputs = original(self, prompt, sampling_params, request_id, **more)
    server, every = _server.get(), engine.options("grpo")["journal"]
    if server is None or not every:
        return outputs
    if not hasattr(server, "_flashpatch_grpo_journal"):
        server._flashpatch_grpo_journal = find()
    to = server._flashpatch_grpo_journal
    return outputs if to is None else reported(outputs, to, request_id, every, server)


async def reported(
    outputs: AsyncIterator[Any], to: Any, request_id: str, every: int, server: Any
) -> AsyncIterator[Any]:
    """Yield the engine's outputs, and tell the journal ``to`` of each ``every`` tokens and of the end.

    If the engine is ahead of its reader an output holds several steps, so a report may hold more. A response that
    ends before its first report is due is not reported.
    """
    sent = 0
    async for output in outputs:
        if output.outputs:
            one = output.outputs[0]
            new = len(one.token_ids) - sent
            ends = one.finish_reason in ("stop", "length")
            if new and (new >= every or (ends and sent)):
                tokens = list(one.token_ids[sent:])
                to.add.remote(
                    request_id,
                    sent,
                    tokens,
                    _logprobs(one, sent, tokens),
                    getattr(server, "global_steps", None),
                    "completed" if ends else None,
                )
                sent += new
        yield output


def _logprobs(one: Any, sent: int, tokens: list[int]) -> list[float] | None:
    if one.logprobs is None:
        return None
    found = one.logprobs[sent : sent + len(tokens)]
    return [at[token].logprob for token, at in zip(tokens, found, strict=True)]
