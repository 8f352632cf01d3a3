"""When an update is committed: finish, a step, sleep, and other threads in between."""

import threading
import types

import fp8_toys as toys
import pytest
from machine import limit

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry, stated
from flashpatch.patches.fp8.vllm import worker as vllm_worker

A, B = toys.checkpoint(0), toys.checkpoint(1)


class Runner:
    """What owns the models of one engine."""

    def serves(self) -> bool:
        """Commit what is complete, as a step does; return whether the models may generate."""
        return model_registry.first_unservable(model_registry.all_models(self)) is None


def test_an_update_that_is_given_up_while_the_engine_sleeps_is_given_up(atomic):
    """It stayed open: later whole calls went into it, and were never committed. W4."""
    engine = toys.engine(atomic=atomic)
    with pytest.raises(ConnectionError), stated.update([engine.managed]):
        engine.load(B[:1])
        engine.managed.asleep = True
        raise ConnectionError
    assert engine.managed.state != "open"
    engine.managed.asleep = False
    engine.load(B)
    engine.managed.after_call()
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", B))


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_committed_while_the_memory_is_away(level, atomic):
    """A request may come while the engine sleeps; here a drafter's update, which level 2 does not drop, is complete."""
    runner = Runner()
    with model_registry.owned_by(runner):
        engine = toys.engine("quantized", atomic=atomic, role="drafter")
        model_registry.add(engine.model, engine.managed)
    worker = types.SimpleNamespace(model_runner=runner)
    engine.model.load_weights(B)
    vllm_worker.worker_sleep(lambda worker, level: None, worker, level)
    assert runner.serves() and engine.managed.version == 0
    vllm_worker.worker_wake_up(lambda worker, tags: None, worker)
    assert runner.serves() and engine.managed.version == 1
    assert toys.same_answers(engine.model, toys.fresh("quantized", B))


def test_a_closed_engine_s_version_is_not_the_next_one_s():
    """Its model may live on: a caller or a captured graph may hold it."""
    closed, runner = Runner(), Runner()
    with model_registry.owned_by(closed):
        engine = toys.engine("quantized")
        model_registry.add(engine.model, engine.managed)
    engine.model.load_weights(B)
    engine.managed.finish()
    assert model_registry.version(model_registry.all_models(closed)) == 1
    del closed
    assert model_registry.version(model_registry.all_models(runner)) == 0 and runner.serves()


def test_a_drafter_s_version_is_noted_under_its_own_name(monkeypatch):
    """Else the one of two models that commits last gives the process its policy version."""
    noted = {}
    monkeypatch.setattr(ledger, "note", noted.update)
    monkeypatch.setattr(ledger, "notes", lambda: noted)
    runner = Runner()
    with model_registry.owned_by(runner):
        policy, drafter = toys.engine("quantized"), toys.engine("quantized", role="drafter")
        for engine in (policy, drafter):
            model_registry.add(engine.model, engine.managed)
    assert (noted["policy_state"], noted["drafter_state"]) == ("ready", "ready"), "before any update"
    for _ in range(2):
        policy.model.load_weights(B)
        assert runner.serves()
    drafter.model.load_weights(B)
    assert runner.serves()
    assert noted.pop("policy_since")
    assert noted == {
        "policy_version": 2,
        "policy_state": "ready",
        "updates": 2,
        "drafter_version": 1,
        "drafter_state": "ready",
    }
    with model_registry.owned_by(Runner()):
        model_registry.add((other := toys.engine("quantized")).model, other.managed)
    assert (noted["policy_version"], noted["updates"]) == (0, 2), (
        "an engine that opens takes no evidence away"
    )


def in_the_middle(engine, weights, act):
    """Load ``weights``, and call ``act`` in another thread half-way; what it raised, or None."""
    raised = []

    def guarded():
        try:
            act()
        except Exception as error:
            raised.append(error)

    def stream():
        for index, item in enumerate(weights):
            if index == len(weights) // 2:
                other = threading.Thread(target=guarded)
                other.start()
                other.join(timeout=limit(60))
                assert not other.is_alive()
            yield item

    engine.load(stream())
    return raised[0] if raised else None


def test_two_senders_at_once(atomic):
    engine = toys.engine(atomic=atomic)
    error = in_the_middle(engine, B, lambda: engine.load(A))
    assert isinstance(error, PatchError) and "another update" in str(error)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_a_sender_waits_while_another_thread_commits(atomic, monkeypatch):
    engine, raised, sender = toys.engine(atomic=atomic), [], []
    commit = engine.managed._update.commit

    def send():
        try:
            engine.load(A)
        except PatchError as error:
            raised.append(error)

    def slowly(*args):
        sender.append(threading.Thread(target=send))
        sender[0].start()
        sender[0].join(timeout=0.5)
        assert sender[0].is_alive(), "it did not wait"
        return commit(*args)

    engine.load(B)
    monkeypatch.setattr(engine.managed._update, "commit", slowly)
    engine.managed.before_request()
    sender[0].join(timeout=limit(60))
    assert not raised and (engine.managed.version, engine.managed.state) == (1, "open")
    monkeypatch.undo()
    engine.managed.before_request()
    assert toys.same_answers(engine.model, toys.fresh("transposed", A))
