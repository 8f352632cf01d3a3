"""The state machine of weight updates on real engines, run by `vllm_lab.scenario` in the engines' process.

Engines are opened once. Each sequence begins with a complete update to the first checkpoint, whatever the one before
left behind. What each call must lead to is worked out by `fp8_update_spec`; answers are compared with those of fresh
engines on whole checkpoints, and on mixtures whose last layer is another's.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from typing import Any

import vllm_updates as updates
from fp8_update_spec import FAILS, OK, Policy, Spec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
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
        from flashpatch.patches.fp8.vllm import scheduler_gate

        self.llm, self.known, self.options = llm, known, options
        self.runner, self.model = engines.inner_runner(llm), engines.inner_model(llm)
        self.managed = model_registry.get(self.model)
        self.core = llm.llm_engine.engine_core.engine_core
        self.gate = scheduler_gate.gates[self.core]
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
            self.step()
        self.count["failed calls" if error else "calls"] += 1
        self.check()
        return error

    def step(self) -> None:
        """The engine core asks its workers: what is complete is committed."""
        spec = self.spec
        if spec.is_open and not spec.session and spec.complete:
            self.count["commits by a step"] += 1
            spec.failed() if spec.finish(False) == FAILS else spec.succeeded()

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
        assert self.core.get_weight_version() == f"flashpatch-{self.managed.version}"
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


which, seeds, sizes = st.integers(0, 1), st.integers(0, 1), st.integers(1, 12)
orders = st.one_of(st.none(), st.integers(0, 99))
ways = st.sampled_from(["direct", "rpc"])


def shuffled(items: list, order: int | None) -> list:
    """``items``, in another order if one is given."""
    return items if order is None else random.Random(order).sample(items, len(items))


class Updates(RuleBasedStateMachine):
    """Calls to one or two engines in this process."""

    opened: list[Engine] = []
    sequences = 0

    @initialize()
    def reset(self) -> None:
        type(self).sequences += 1
        for engine in self.opened:
            engine.reset()

    def engine(self, index: int) -> Engine:
        """The first engine mostly."""
        return self.opened[index % len(self.opened)]

    @rule(index=which, number=seeds, order=orders, session=st.booleans())
    def new_sender(self, index: int, number: int, order: int | None, session: bool) -> None:
        engine = self.engine(index)
        engine.sender = shuffled([(name, number) for name in engine.names], order)
        if session and not engine.spec.hopeless:
            from vllm.model_executor.model_loader.reload import layerwise

            engine.call(engine.spec.begin(), lambda: layerwise.initialize_layerwise_reload(engine.model))

    @rule(index=which, size=sizes, door=ways)
    def bucket(self, index: int, size: int, door: str) -> None:
        engine = self.engine(index)
        items, engine.sender = engine.sender[:size], engine.sender[size:]
        if items:
            engine.load(items, door)

    @rule(index=which, door=ways)
    def rest(self, index: int, door: str) -> None:
        self.bucket(index, 99, door)

    @rule(index=which, number=seeds, order=orders, size=sizes, bad=st.integers(-30, 11), door=ways)
    def stray_bucket(self, index, number, order, size, bad, door) -> None:
        """Some tensors of a checkpoint in a call of their own, perhaps with a NaN."""
        engine = self.engine(index)
        items = shuffled([(name, number) for name in engine.names], order)[:size]
        if bad >= 0:
            items[bad % size] = (items[bad % size][0], None)
        engine.load(items, door)

    @rule(index=which, size=sizes, door=ways)
    def sender_dies(self, index: int, size: int, door: str) -> None:
        engine = self.engine(index)
        engine.load(engine.sender[:size], door, end=ConnectionError("the sender died"))

    @rule(index=which, how=st.sampled_from(["unknown", "shape", "dtype"]), size=st.integers(0, 9))
    def bucket_that_does_not_fit(self, index: int, how: str, size: int) -> None:
        engine = self.engine(index)
        items = engine.tensors([(name, 1) for name in engine.names[:size]])
        name, tensor = engine.tensors([(engine.names[size], 1)])[0]
        bad = {
            "unknown": ("model.layers.1.nonsense.weight", tensor),
            "shape": (name, tensor[..., :-1]),
            "dtype": (name, tensor.int()),
        }[how]
        engine.call(FAILS, lambda: engine.model.load_weights([*items, bad]))
        engine.sender = []

    @rule(index=which, number=seeds)
    def partial_update(self, index: int, number: int) -> None:
        engine = self.engine(index)
        engine.load([(name, number) for name in engine.names if LAYER in name], partial=True)

    @rule(index=which, by=st.sampled_from(["finalize", "process"]))
    def finish(self, index: int, by: str) -> None:
        engine = self.engine(index)
        if not engine.commits_only_known("finish", None):
            return
        from vllm.model_executor.model_loader.reload import layerwise

        engine.call(
            engine.spec.finish(None),
            (lambda: updates.finish(engine.llm))
            if by == "process"
            else (lambda: layerwise.finalize_layerwise_reload(engine.model, engine.runner.model_config)),
        )
        engine.sender = []

    @rule(index=which, number=seeds, order=orders, breaks=st.integers(-40, 20))
    def reload_weights(self, index: int, number: int, order: int | None, breaks: int) -> None:
        """vLLM's own reload, through the engine; it may break off."""
        engine = self.engine(index)
        items = shuffled([(name, number) for name in engine.names], order)
        if engine.spec.hopeless:
            return
        engine.spec.begin()
        engine.spec.load(items[:breaks] if breaks >= 0 else items)
        tensors = engine.tensors(items)
        stream = iter(tensors) if breaks < 0 else updates.failing(tensors, breaks)
        outcome = FAILS if breaks >= 0 else engine.spec.finish(None)
        engine.call(outcome, lambda: engine.rpc("reload_weights", kwargs=dict(weights_iterator=stream)))
        engine.sender = []

    @rule(index=which, number=seeds, order=orders, cut=sizes, door=ways, session=st.booleans())
    def complete_update(self, index, number, order, cut, door, session) -> None:
        """Every tensor once: served, whatever was before."""
        engine = self.engine(index)
        items = shuffled([(name, number) for name in engine.names], order)
        if engine.spec.hopeless:
            return
        if session:
            engine.call(engine.spec.begin(), engine.managed.begin)
        else:
            cut = len(items)  # nobody can tell where what a dead sender sent ends
        for start in range(0, len(items), cut):
            engine.load(items[start : start + cut], door)
        if engine.spec.session:
            engine.call(engine.spec.finish(None), engine.managed.finish)
        engine.ask()
        assert engine.managed.may_generate

    @rule(index=which)
    def request(self, index: int) -> None:
        self.engine(index).ask()

    @rule(index=which)
    def running_request(self, index: int) -> None:
        self.engine(index).start()

    @rule(index=which)
    def sleep(self, index: int) -> None:
        """Level 2, emulated: the weights' memory holds something else."""
        import torch

        engine = self.engine(index)
        if engine.options["atomic"] == "model":
            return  # nothing could be sent afterwards
        engine.drain()
        engine.check()
        with torch.no_grad():
            for param in engine.model.parameters():
                param.view(torch.uint8).fill_(0x3C) if param.dim() else param.fill_(1.5)
        engine.managed.mark_discarded()
        engine.spec.discard()
        engine.sender = []

    @invariant()
    def agree(self) -> None:
        for engine in self.opened:
            if hasattr(engine, "spec"):
                engine.check()


def explore(
    paths: list[str],
    known: dict[str, list],
    options: dict[str, Any],
    sequences: int,
    steps: int,
    chosen: int | None,
    both: bool = True,
    **kw: Any,
) -> dict[str, Any]:
    """Run sequences on engines with ``options``; ``chosen``: the seed, None for the same sequences every time."""
    import contextlib

    import flashpatch

    flashpatch.enable("bf16", **options)
    profile = settings(
        max_examples=sequences,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=chosen is None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(engines.open_llm(paths[0], **kw)) for _ in range(1 + both)]
        Updates.opened, Updates.sequences = [Engine(llm, paths, known, options) for llm in opened], 0
        machine = Updates if chosen is None else seed(chosen)(Updates)
        run_state_machine_as_test(machine, settings=profile)
        found = dict(sequences=Updates.sequences, counts=sum((e.count for e in Updates.opened), Counter()))
        Updates.opened = []
    flashpatch.disable("bf16")
    return found
