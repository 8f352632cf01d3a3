"""A real engine under weight updates beside its `Spec`, and the checks that hold after every call."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import vllm_updates as updates
from fp8_update_spec import FAILS, OK, Policy, Spec
from vllm_lab import engines, models

LAYER = ".layers.1."  # what a partial update brings
TOKENS = 5
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gu", "up_proj": "gu"}


def key(policy: Policy) -> str:
    """Name of a policy that there is an answer for: the seed of its last layer, and of the rest; else empty."""
    last = {seed for name, seed in policy.items() if LAYER in name}
    rest = {seed for name, seed in policy.items() if LAYER not in name}
    return f"{rest.pop()}-{last.pop()}" if len(last) == len(rest) == 1 else ""


class Engine:
    """One engine beside the `Spec` of its model.

    Args:
        llm: an in-process ``vllm.LLM``.
        paths: a checkpoint for each seed.
        known: `key` of a policy to its greedy tokens.
        options: of the family.
    """

    def __init__(self, llm: Any, paths: list[str], known: dict[str, list], options: dict[str, Any]) -> None:
        from flashpatch.patches.fp8.refit import model_registry
        from flashpatch.patches.fp8.vllm import engine_core

        self.llm, self.known, self.options = llm, known, options
        self.runner, self.model = engines.inner_runner(llm), engines.inner_model(llm)
        self.managed = model_registry.get(self.model)
        self.core = llm.llm_engine.engine_core.engine_core
        self.gate = engine_core.gates[self.core]
        self.checkpoints = [dict(models.weights(path)) for path in paths]
        self.places = engines.addresses(self.model)
        self.count: Counter[str] = Counter()
        self.running: dict[str, tuple[int, Policy]] = {}  # request -> version and policy at its start
        self._numbers = itertools.count()
        self.policies: dict[int, str] = {}  # version -> policy
        self.names = list(self.checkpoints[0])

    def reset(self) -> None:
        """Begin a sequence: a complete update mends whatever there is."""
        self.sender: list[tuple[str, int | None]] = []
        self.managed.begin()
        self.model.load_weights(iter(self.checkpoints[0].items()))
        self.managed.finish()
        first = dict.fromkeys(self.names, 0)
        self.spec = Spec(
            {name: _layer(name) for name in self.names},
            self.names,
            (),
            first,
            self.options["atomic"],
            self.options["partial"],
        )
        self.spec.version = self.managed.version
        self.drain()
        self.ask()

    def tensors(self, items: list[tuple[str, int | None]]) -> list[tuple[str, Any]]:
        """The tensors behind names and seeds; None: one that holds a NaN."""

        def tensor(name: str, number: int | None) -> Any:
            found = self.checkpoints[number or 0][name]
            return spoiled(found) if number is None else found

        return [(name, tensor(name, number)) for name, number in items]

    def call(self, outcome: str, action: Any, through_engine: bool = False) -> Exception | None:
        """Do ``action``, of which the spec expects ``outcome``; ``through_engine``: workers are asked afterwards."""
        error = None
        try:
            action()
        except Exception as problem:
            error = problem
        assert error is not None or outcome != FAILS, f"this should have failed; {vars(self.spec)}"
        assert error is None or outcome != OK, f"this should have worked: {error!r}; {vars(self.spec)}"
        self.spec.succeeded() if error is None else self.spec.failed()
        if through_engine and error is None:
            self.step(more=True)
        self.count["failed calls" if error else "calls"] += 1
        self.check()
        return error

    def step(self, more: bool = False) -> None:
        """The engine core asks its workers, before a step or after another call: what is complete is committed."""
        outcome = self.spec.request(more)
        self.count["commits by a step"] += bool(self.spec._commits)
        self.spec.failed() if outcome == FAILS else self.spec.succeeded()

    def commits_only_known(self, call: str, *args: Any) -> bool:
        """Whether there is an answer for whatever this call would commit."""
        trial = copy.deepcopy(self.spec)
        getattr(trial, call)(*args)
        return all(key(policy) in self.known for policy in trial._commits)

    def load(self, items: list, door: str = "direct", partial: bool | None = None, end: Any = None) -> None:
        """One bucket; ``door``: into the model, or as a call through the engine; ``end``: ends the sender."""
        if not self.commits_only_known("load", items, partial):
            return
        keywords = {} if partial is None else {"partial": partial}
        tensors, outcome = self.tensors(items), self.spec.load(items, partial)

        def stream() -> Any:
            yield from tensors
            if end is not None:
                raise end

        def into(worker: Any) -> None:
            self.model.load_weights(stream(), **keywords)

        error = self.call(
            FAILS if end is not None else outcome,
            (lambda: into(None)) if door == "direct" else (lambda: self.rpc(into)),
            door == "rpc",
        )
        if error is not None:
            self.sender = []

    def rpc(self, function: Any, **keywords: Any) -> None:
        self.llm.collective_rpc(function, **keywords)

    def check(self) -> None:
        """What holds at all times."""
        policy = self.managed.policy()
        assert self.managed.may_generate == self.spec.serves, f"{policy}; {vars(self.spec)}"
        assert self.managed.version == policy.version == self.spec.version, f"{policy}; {vars(self.spec)}"
        assert engines.addresses(self.model) == self.places, "tensors have moved"

    def start(self) -> None:
        """Leave a request running, some tokens in."""
        self.drain()
        self.step()
        name = f"running-{next(self._numbers)}"
        problem = updates.error(lambda: self._add(name, 0, 24))
        for _ in range(3) if problem is None else ():
            problem = problem or updates.error(self.llm.llm_engine.step)
        assert (problem is None) == self.spec.serves, problem
        self.check()
        if problem is None:
            self.running[name] = (self.spec.version, self.spec.served[0])

    def drain(self) -> None:
        """Let the running requests end: by length, or aborted with another policy, or refused."""
        if self.running:
            self.step()
        ended = {}

        def run() -> None:
            while self.llm.llm_engine.has_unfinished_requests():
                ended.update((output.request_id, output.outputs[0]) for output in self.llm.llm_engine.step())

        problem = updates.error(run)
        assert problem is None or not self.spec.serves, problem
        for name, (version, policy) in self.running.items() if problem is None else ():
            output = ended[name]
            self.count[f"ended by {output.finish_reason}"] += 1
            if version == self.spec.version:
                assert output.finish_reason == "length"
                assert list(output.token_ids)[:TOKENS] == self.known[key(policy)][0]
            else:
                wanted = "abort" if self.options["in_flight"] == "abort" else "length"
                assert output.finish_reason == wanted, (output.finish_reason, wanted)
        self.running.clear()

    def ask(self) -> None:
        """A request is answered by the committed policy, or refused by name."""
        self.drain()
        self.step()
        found = []
        for prompt in range(2):
            problem = updates.error(lambda: found.append(self._answer(prompt)))
            assert (problem is None) == self.spec.serves, f"{problem}; {vars(self.spec)}"
            assert problem is None or problem.startswith("PatchError"), problem
        self.check()
        if not self.spec.serves:
            self.count["refused"] += 1
            return
        self.count["answered"] += 1
        fits = [policy for policy in self.spec.served if self.known[key(policy)][: len(found)] == found]
        assert fits, f"the answer is of no policy that was committed: {found}; {vars(self.spec)}"
        self.spec.served = fits[:1]
        assert self.gate.version == self.managed.version
        assert engines.weight_version(self.core) == f"flashpatch-{self.managed.version}"
        known = self.policies.setdefault(self.managed.version, key(fits[0]))
        assert known == key(fits[0]), "one version stands for two policies"

    def _add(self, name: str, prompt: int, tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(engines.PROMPTS[prompt])}, sampling)

    def _answer(self, prompt: int) -> list[int]:
        self._add(f"asked-{next(self._numbers)}", prompt, TOKENS)
        last = []
        while self.llm.llm_engine.has_unfinished_requests():
            last = [list(output.outputs[0].token_ids) for output in self.llm.llm_engine.step()]
        return last[0]


def spoiled(tensor: Any) -> Any:
    """A copy with a NaN in it."""
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


def _layer(name: str) -> str:
    module, _, _ = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{FUSED.get(last, last)}"
