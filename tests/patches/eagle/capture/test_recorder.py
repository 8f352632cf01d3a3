"""A model of an engine that speculates: drafts are accepted or not, prompts come in chunks or from a cache,
requests are preempted and aborted. The state of a row is a function of all tokens before it, so a row taken
from a rejected branch shows."""

import random
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from machine import limit, until
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.patches.eagle.capture import recorder as recorder_module
from flashpatch.patches.eagle.capture.device_copy import DeviceCopy
from flashpatch.patches.eagle.capture.recorder import Recorder
from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter

WIDTH = 4


def state(prefix: list[int], layer: int = 0) -> list[float]:
    noise = random.Random(str((layer, prefix)))
    return [noise.random() for _ in range(WIDTH)]


class Engine:
    """Runs requests over a vocabulary of three tokens, so that wrong drafts are often right by accident."""

    def __init__(self, recorder: Recorder, seed: int, layers: int = 0) -> None:
        self.recorder, self.noise, self.layers = recorder, random.Random(seed), layers
        self.requests: dict[str, dict] = {}
        self.ended: dict[str, tuple[list[int], int]] = {}

    def add(self, name: str, prompt: int, tokens: int) -> None:
        text = [self.noise.randrange(3) for _ in range(prompt)]
        cached = self.noise.choice([0, 0, prompt // 2])
        self.requests[name] = dict(text=text, prompt=prompt, end=prompt + tokens, done=cached, cached=cached)

    def step(self) -> None:
        names = [name for name in self.requests if self.noise.random() < 0.8]
        self.noise.shuffle(names)
        ids, positions, hidden, lengths, side = [], [], [], [], [[] for _ in range(self.layers)]
        over = {}
        for name in names:
            one = self.requests[name]
            if self.noise.random() < 0.05:
                one["done"] = self.noise.randrange(one["cached"], one["done"] + 1)  # preempted, partly cached
            text, done = one["text"], one["done"]
            due = text[done:]
            if len(due) > 1:
                due = due[: self.noise.randrange(1, len(due) + 1)]  # a chunk of the prompt
                fed = due
            else:
                fed = due + [self.noise.randrange(3) for _ in range(self.noise.randrange(4))]
            for offset in range(len(fed)):
                prefix = text[:done] + fed[: offset + 1]
                positions.append(done + offset)
                hidden.append(state(prefix))
                for layer in range(self.layers):
                    side[layer].append(state(prefix, layer + 1))
            ids += fed
            lengths.append(len(fed))
            if done + len(due) == len(text):  # sampled: the drafts that are accepted, and one more
                accepted = self.noise.randrange(len(fed) - len(due) + 1)
                text += fed[len(due) : len(due) + accepted] + [self.noise.randrange(3)]
                del text[one["end"] :]
                one["done"] = done + len(due) + accepted
                if len(text) == one["end"] or self.noise.random() < 0.03:
                    over[name] = (list(text), one["prompt"])
            else:
                one["done"] = done + len(due)
        if names:
            self.recorder.step(
                names,
                lengths,
                torch.tensor(ids + [9], dtype=torch.int32),
                torch.tensor(positions + [0], dtype=torch.int32),
                torch.tensor(hidden + [[9.0] * WIDTH]),
                [torch.tensor(layer + [[9.0] * WIDTH]) for layer in side] or None,
            )
        for name in over:
            del self.requests[name]
        self.ended.update(over)
        self.recorder.finish(over)


def new_recorder(directory, **more) -> Recorder:
    return Recorder(SampleWriter(directory, waiting=1000), **more)


def kept(recorder: Recorder) -> list:
    """Return the samples of a recorder, which ends."""
    assert recorder.flush()
    recorder.close()
    return SampleReader(recorder.writer.directory).read_samples(99)


def check(engine: Engine, samples, layers: int = 0) -> None:
    for one in samples:
        tokens, prompt = engine.ended[one.request]
        assert one.input_ids.tolist() == tokens
        assert one.response.tolist() == [i >= prompt for i in range(len(tokens))]
        for at in range(len(tokens)):
            wanted = state(tokens[: at + 1]) if one.known[at] else [0.0] * WIDTH
            assert torch.allclose(one.hidden[at], torch.tensor(wanted)), (one.request, at)
            for layer in range(layers):
                side = state(tokens[: at + 1], layer + 1) if one.known[at] else [0.0] * WIDTH
                found = one.auxiliary[at, layer * WIDTH : (layer + 1) * WIDTH]
                assert torch.allclose(found, torch.tensor(side))


@settings(max_examples=40)
@given(seed=some.integers(0, 10**6), layers=some.sampled_from([0, 0, 2]))
def test_every_known_row_belongs_to_the_tokens_that_were_kept(tmp_path_factory, seed, layers):
    recorder = new_recorder(tmp_path_factory.mktemp("queue") / "r")
    engine = Engine(recorder, seed, layers)
    for number in range(4):
        engine.add(f"r{number}", engine.noise.randrange(1, 20), engine.noise.randrange(1, 30))
    steps = 0
    while engine.requests:
        engine.step()
        steps += 1
        if steps % 17 == 0:
            recorder.flush()
    samples = kept(recorder)
    check(engine, samples, layers)
    assert recorder.counts["requests"] == len(samples) and not recorder.problem
    assert recorder.counts["mismatched"] == 0
    # all that was computed is there: at most the cached prefix and the last token are not
    for one in samples:
        unknown = (~one.known).nonzero().flatten().tolist()
        assert unknown[-1] == len(one) - 1
        assert unknown[:-1] == list(range(len(unknown) - 1))


def test_rows_of_an_older_policy_are_masked(tmp_path):
    recorder = new_recorder(tmp_path)
    recorder.step(["a"], [3], torch.tensor([1, 2, 0]), torch.arange(3), torch.ones(3, WIDTH))
    recorder.version = 5
    recorder.step(["a"], [2], torch.tensor([1, 1]), torch.tensor([3, 4]), torch.full((2, WIDTH), 2.0))
    recorder.finish({"a": ([1, 2, 0, 1, 1, 0], 2)})
    [one] = kept(recorder)
    assert one.version == 5
    assert one.known.tolist() == [False, False, False, True, True, False]
    assert one.hidden[:3].abs().sum() == 0


def test_a_row_whose_input_was_another_token_is_masked_and_counted(tmp_path):
    recorder = new_recorder(tmp_path)
    recorder.step(["a"], [3], torch.tensor([1, 2, 0]), torch.arange(3), torch.ones(3, WIDTH))
    recorder.finish({"a": ([1, 0, 0, 2], 2)})
    [one] = kept(recorder)
    assert one.known.tolist() == [True, False, True, False] and recorder.counts["mismatched"] == 1


def capture(recorder: Recorder, name: str) -> None:
    """Run a request of six steps, all of whose states are seen."""
    recorder.step([name], [6], torch.zeros(6, dtype=torch.int64), torch.arange(6), torch.ones(6, WIDTH))
    recorder.finish({name: ([0] * 7, 1)})


def test_states_are_captured_once_somebody_asks_and_their_files_go_with_the_engine(tmp_path):
    engines = [new_recorder(tmp_path / "queue", named=False) for _ in range(2)]
    for one in engines:
        capture(one, "unread")
        assert one.stored(reads=False)["rows"] == 0
        capture(one, "unread")
        assert one.stored()["rows"] == 0
        capture(one, "read")
        one.flush()
    until(lambda: len(SampleReader(tmp_path / "queue").waiting()) == 2)
    engines[0].close()
    [left] = SampleReader(tmp_path / "queue").read_samples(9)
    assert left.request == "read" and left.known.sum() == 6
    engines[1].close()
    assert not (tmp_path / "queue").exists()


def test_the_budget_chooses_requests(tmp_path):
    recorder = new_recorder(tmp_path, budget=20)
    for name in "abcd":
        capture(recorder, name)
    recorder.version = 1
    capture(recorder, "e")
    assert [found.request for found in kept(recorder)] == ["a", "b", "e"]
    assert recorder.counts["skipped"] == 2


def test_the_budget_holds_for_requests_that_run_and_what_was_captured_is_kept(tmp_path):
    recorder = new_recorder(tmp_path, budget=60)
    names, ids = list(map(str, range(10))), torch.zeros(20, dtype=torch.int64)
    for step in range(50):  # a token and a draft, which is right
        places = torch.tensor([2 * step, 2 * step + 1]).repeat(10)
        recorder.step(names, [2] * 10, ids, places, torch.ones(20, WIDTH))
    assert recorder.counts["rows"] == 60
    tokens = [
        [0] * 101,
        [0, 0, 0, 0, 1, *[0] * 96],
    ]  # of the second one the last step's first row was another
    recorder.finish({name: (tokens[number % 2], 1) for number, name in enumerate(names)})
    found = kept(recorder)
    assert [int(one.known.sum()) for one in found] == [6, 4] * 5 and recorder.counts["requests"] == 10


def test_prompts_leave_half_of_the_budget_to_answers(tmp_path):
    """A step's prompts come before any answer: 40 of 100 tokens would spend all of it, and teach nothing."""
    recorder = new_recorder(tmp_path, budget=1000, window=32)
    names, states = list(map(str, range(40))), torch.ones(400, WIDTH)
    places = torch.arange(100)
    for first in range(0, 40, 4):
        recorder.step(names[first : first + 4], [100] * 4, 0 * places.repeat(4), places.repeat(4), states)
    for at in range(100, 140):
        recorder.step(names, [1] * 40, 0 * torch.arange(40), torch.full((40,), at), states)
    recorder.finish({name: ([0] * 141, 100) for name in names})
    found = kept(recorder)
    assert len(found) == 16 and 1000 <= recorder.counts["rows"] < 1000 + 40  # to the end of a step
    learned = [int((one.known[:-1] & one.known[1:] & one.response[1:]).sum()) for one in found]
    assert sum(learned) > 0, learned


def test_without_memory_requests_are_given_up_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "_TOKENS", 256)
    recorder = new_recorder(tmp_path)
    long = torch.zeros(200, dtype=torch.int64)
    recorder.step(["a", "b"], [200, 200], long.repeat(2), torch.arange(200).repeat(2), torch.ones(400, WIDTH))
    recorder.flush()
    recorder.finish({"a": ([0] * 201, 1), "b": ([0] * 201, 1)})
    recorder.flush()
    until(lambda: recorder.writer.counts["written"] == 1)
    recorder.step(["c"], [200], long, torch.arange(200), torch.ones(200, WIDTH))  # in the memory of a
    recorder.finish({"c": ([0] * 201, 1)})
    assert [found.request for found in kept(recorder)] == ["a", "c"]
    assert recorder.counts["lost"] == 1 and len(recorder._buffers._free) == 2


def test_a_step_that_cannot_be_stored_costs_its_requests_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "_TOKENS", 256)
    recorder = new_recorder(tmp_path)
    zeros = torch.zeros(200, dtype=torch.int64)
    recorder.step(["a"], [200], zeros, torch.arange(200), torch.ones(200, WIDTH))
    recorder.flush()
    with monkeypatch.context() as broken:
        broken.delattr(recorder._buffers.__class__, "file")
        recorder.step(["b"], [3], zeros[:3], torch.arange(3), torch.ones(3, WIDTH))
        recorder.finish({"a": ([0] * 201, 1)})  # with the step that fails
        recorder.flush()
    assert [found.request for found in kept(recorder)] == ["a"] and "file" in recorder.problem
    assert recorder.counts["lost"] == 1 and len(recorder._buffers._free) == 2


def test_nothing_is_raised_into_the_engine(tmp_path, caplog):
    recorder = new_recorder(tmp_path)
    recorder.step(["a", "b"], [3], None, None, None)
    assert "not captured" in caplog.text and "ValueError" in recorder.problem
    recorder.step(["a"], [3], torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.ones(3))  # no width
    recorder.finish({"a": ([0] * 4, 1), "nobody": ([], 0)})
    assert kept(recorder) == [] and recorder.counts["lost"] == 1


def test_a_request_without_its_tokens_is_dropped(tmp_path):
    recorder = new_recorder(tmp_path)
    recorder.step(["a"], [3], torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.ones(3, WIDTH))
    recorder.finish({"a": None})
    assert kept(recorder) == [] and recorder.counts["empty"] == 1


def test_a_name_that_comes_again_is_another_request(tmp_path):
    recorder = new_recorder(tmp_path)
    for token in (1, 2):
        states = torch.full((3, WIDTH), float(token))
        recorder.step(["a"], [3], torch.full((3,), token), torch.arange(3), states)
        recorder.finish({"a": ([token] * 4, 1)})
    one, two = kept(recorder)
    assert one.hidden[:3].unique().tolist() == [1] and two.hidden[:3].unique().tolist() == [2]


class Device:
    """An accelerator's streams as `DeviceCopy` uses them: copies are done when the last event is waited for, and not before
    `free` is set."""

    def __init__(self) -> None:
        self.free, self.waits, self.pinned = threading.Event(), 0, 0
        self.streams: list[object] = ["the engine's"]
        self.Stream = lambda index: SimpleNamespace(wait_stream=lambda other: None)
        self.Event = lambda: SimpleNamespace(record=lambda stream: None, synchronize=self.synchronize)
        self.current_stream, self.set_stream = lambda index: self.streams[-1], self.streams.append

    def synchronize(self) -> None:
        self.waits += 1
        assert self.free.wait(limit(60))


@pytest.fixture
def device(monkeypatch) -> Device:
    """Take tensors on the host as an accelerator's."""
    one, empty = Device(), torch.empty

    def taken(*size, pin_memory=False, **more) -> torch.Tensor:
        one.pinned += pin_memory
        return empty(*size, **more)

    monkeypatch.setattr(torch, "get_device_module", lambda of: one)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch, "empty", taken)
    monkeypatch.setattr(DeviceCopy, "copy_rows", DeviceCopy._from_device)
    return one


@pytest.mark.parametrize(
    "mib,kept", [(20, [32, 32]), (449, [512, 512]), (641, [704, 704]), (1025, [1088, 1088])]
)
def test_two_steps_of_long_prompts_are_kept_in_little_more_than_they_need(mib, kept, monkeypatch):
    """16,384 tokens of a 7B, 32B and 70B with EAGLE-3: the second is copied while the first is stored."""
    empty, copies = torch.empty, DeviceCopy()
    monkeypatch.setattr(torch, "empty", lambda size, **_: empty(size, dtype=torch.uint8, device="meta"))
    made = [copies._pinned_for(mib << 20) for _ in range(2)]
    assert [one.numel() >> 20 for one in made] == kept
    if mib > 512:
        with pytest.raises(RuntimeError, match="faster than they can be stored"):
            copies._pinned_for(mib << 20)
    copies._pinned.append(made[0])
    assert copies._pinned_for(mib << 20) is made[0]


def test_a_large_batch_of_an_accelerator_is_stored_a_few_times_and_nothing_is_lost(tmp_path, device):
    """The recorder's thread makes few calls for a row, or the engine's would wait for Python's lock."""
    requests, steps, calls = 256, 96, Counter()
    recorder = new_recorder(tmp_path)
    threading.setprofile(lambda frame, event, argument: calls.update(["call"] if "call" in event else []))
    names, ids = [f"r{number}" for number in range(requests)], torch.empty(requests, dtype=torch.int64)
    positions, hidden = torch.empty_like(ids), torch.empty(requests, WIDTH)
    for at in range(steps):  # the engine writes over its tensors while no copy is stored yet
        ids.fill_(at)
        positions.fill_(at)
        hidden.copy_(torch.arange(requests)[:, None] + at)
        recorder.step(names, [1] * requests, ids, positions, hidden, [hidden, 2 * hidden])
    threading.setprofile(None)
    device.free.set()
    assert recorder.flush(limit(60))
    assert device.streams[::2] == ["the engine's"] * (steps + 1)
    assert calls["call"] < 2 * requests * steps and device.pinned <= -(-steps // 32), (calls, device.pinned)
    recorder.finish({name: ([*range(steps), 0], 1) for name in names})
    recorder.close(limit(60))
    samples = SampleReader(tmp_path).read_samples(requests)
    assert len(samples) == requests and recorder.counts["lost"] == 0 and not recorder.problem
    assert device.waits <= -(-steps // 32) + 1
    for one in samples:
        wanted = (torch.arange(steps) + int(one.request[1:])).float()[:, None].expand(steps, WIDTH)
        assert one.known.tolist() == [True] * steps + [False]
        assert torch.equal(one.hidden[:steps], wanted)
        assert torch.equal(one.auxiliary[:steps], torch.cat([wanted, 2 * wanted], dim=-1))


class Launches(TorchDispatchMode):
    """Count operators that an accelerator runs; a view is none, nor is memory that is only taken."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self.seen[func.name()] += 1
        return found


@pytest.mark.parametrize(("layers", "most"), [(0, 2), (3, 3)])
def test_the_engines_thread_launches_little_and_waits_for_nothing(tmp_path, device, layers, most):
    """Its Python is a few calls per request, whatever the states' size."""
    requests, calls = 64, Counter()
    recorder = new_recorder(tmp_path)
    names = [f"r{number}" for number in range(requests)]
    hidden = torch.ones(requests, 6, dtype=torch.bfloat16)
    ids, positions = (torch.zeros(requests + 3, dtype=kind) for kind in (torch.int32, torch.int64))

    def step() -> None:
        recorder.step(names, [1] * requests, ids, positions, hidden, [hidden] * layers or None)

    step()
    with Launches() as launches:
        step()
    sys.setprofile(lambda frame, event, argument: calls.update(["call"] if "call" in event else []))
    try:
        step()
    finally:
        sys.setprofile(None)
    assert sum(launches.seen.values()) <= most, launches.seen
    assert calls["call"] < 4 * requests, calls
    device.free.set()
    recorder.close(limit(60))
    assert recorder.counts["lost"] == 0 and not recorder.problem
