"""The state machine of weight updates on real engines, run by `vllm_lab.scenario` in the engines' process.

Engines are opened once. Each sequence begins with a complete update to the first checkpoint, whatever the one before
left behind. What each call must lead to is worked out by `fp8_update_spec`; answers are compared with those of fresh
engines on whole checkpoints, and on mixtures whose last layer is another's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import vllm_updates as updates
from fp8_update_spec import FAILS
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from installed import version_of
from packaging.version import Version
from vllm_lab import engines
from vllm_machine_engine import LAYER, Engine

which, seeds, sizes = st.integers(0, 1), st.integers(0, 1), st.integers(1, 12)
orders = st.one_of(st.none(), st.integers(0, 99))
ways = st.sampled_from(["direct", "rpc"])
# Models of vLLM before 0.27 pass over a tensor that they have no place for, with a warning.
misfits = st.sampled_from(["shape", "dtype"] + ["unknown"] * (version_of("vllm") >= Version("0.27")))


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

    @rule(index=which, how=misfits, size=st.integers(0, 9))
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
