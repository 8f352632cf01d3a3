"""Fifty random syncs, each a difference, leave what a sync of everything leaves; what does not follow is refused."""

import asyncio

import pytest
import torch

from flashpatch.patches.fp8.delta import wire
from flashpatch.patches.fp8.delta.receiver import Receiver
from flashpatch.patches.fp8.delta.sender import Sender

AUDIT = "__flashpatch_audit_open__0-1"


class World:
    """A trainer's weights, a sender and a receiver, and the bytes that went between them."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.weights = {
            "embed": self.normal(97, 64),
            "norm": self.normal(64).float(),
            "odd": self.normal(5),
            "experts": self.normal(4, 32, 48),
            "turned": self.normal(48, 96).t(),
            "scale": torch.tensor(3.0),
            "none": torch.empty(0, 4, dtype=torch.bfloat16),
            "still": self.normal(300),
        }
        self.sender, self.receiver = Sender(), Receiver()
        self.number = 0

    def normal(self, *shape: int):
        return torch.randn(*shape, generator=self.random).bfloat16()

    def train(self, share: float) -> None:
        """Change so many values, by a last bit, to anything, or to what is no number."""
        for name, tensor in self.weights.items():
            if name == "still":
                continue
            flat = tensor.contiguous().view(-1).clone()
            chosen = torch.rand(flat.numel(), generator=self.random) < share
            flat[chosen] = flat[chosen] * 1.0078125
            if name == "embed" and self.number % 7 == 3:
                flat[:2] = torch.tensor([float("nan"), -0.0], dtype=flat.dtype)
            self.weights[name] = flat.view(tensor.shape)

    def stream(self, base: str | None):
        """What the sender yields towards the next version; list it before the weights change."""
        self.number += 1
        items = list(self.weights.items())
        items.insert(0, (AUDIT, torch.full((3,), self.number, dtype=torch.uint8)))
        items.append(("__flashpatch_audit_close__0-1", torch.full((3,), self.number, dtype=torch.uint8)))
        return list(self.sender.stream(items, f"v{self.number}", base))

    def sync(self, base: str | None):
        sent = self.stream(base)
        self.sender.sent()
        return sent, self.take(sent)

    def take(self, sent):
        """What the receiver hands on, None if it refuses."""
        return asyncio.run(loaded(self.receiver, sent))

    def exact(self, found) -> bool:
        names = [AUDIT, *self.weights, "__flashpatch_audit_close__0-1"]
        assert [name for name, _ in found] == names
        return all(equal(tensor, self.weights[name]) for name, tensor in found if name in self.weights)


async def loaded(receiver: Receiver, sent):
    async def arriving():
        buffer = torch.empty(0, dtype=torch.uint8)
        for name, tensor in sent:  # as of verl's NCCL engine: memory is used again
            buffer.fill_(255)
            buffer = tensor.contiguous().view(-1).view(torch.uint8).clone()
            yield name, buffer.view(tensor.dtype).view(tensor.shape)

    weights = await receiver.take(arriving())
    if weights is None:
        return None
    found = [(name, tensor.clone()) async for name, tensor in weights]
    receiver.commit()
    return found


def equal(one, other) -> bool:
    raw = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def whole(world: World) -> int:
    return sum(tensor.nbytes for tensor in world.weights.values())


def test_fifty_differences_leave_what_whole_syncs_leave():
    world = World()
    first, found = world.sync(None)
    assert world.exact(found)
    assert sum(tensor.nbytes for _, tensor in first) > whole(world)  # stock sends all of it each time
    for step in range(50):
        world.train([0.01, 0.03, 0.2, 0.0, 1.0][step % 5])
        sent, found = world.sync(f"v{world.number}")
        assert world.exact(found), f"step {step}"
        kinds = {name for name, _ in sent if not wire.is_message(name)}
        assert "still" not in kinds
        assert world.receiver.version == world.sender.version == f"v{world.number}"
        assert world.sender.last.whole == whole(world) + 6


def test_what_changed_is_what_travels_and_is_counted():
    world = World()
    world.sync(None)
    world.weights["embed"][3, 5] *= 2
    sent, _ = world.sync("v1")
    patches = [wire.of_patch(name) for name, _ in sent if wire.of_patch(name)]
    assert patches == [("embed", 1, 1, "bfloat16")]
    last = world.sender.last.facts()
    assert (last["changed"], last["base"], last["version"]) == (1, "v1", "v2")
    assert last["values"] == sum(tensor.numel() for tensor in world.weights.values())
    assert last["bytes"] == sum(tensor.nbytes for _, tensor in sent) == world.receiver.facts["bytes"]


def test_weights_that_come_go_or_change_their_shape_travel_whole():
    world = World()
    world.sync(None)
    del world.weights["odd"]
    world.weights["fresh"] = world.normal(7, 3)
    world.weights["norm"] = world.weights["norm"][:-1]
    sent, found = world.sync("v1")
    assert world.exact(found)
    assert [name for name, _ in sent if not name.startswith("__flashpatch_")] == ["norm", "fresh"]


def test_weights_that_came_in_float32_and_now_come_in_bf16_are_cast_by_both_ends():
    world = World()
    narrow = {name: tensor.bfloat16() for name, tensor in world.weights.items()}
    fine = {name: tensor * (1 + 1e-4) for name, tensor in ((n, t.float()) for n, t in narrow.items())}
    world.weights = fine
    world.sync(None)
    world.weights = {name: tensor.bfloat16() for name, tensor in fine.items()}
    world.weights["embed"][3, 5] *= 2
    sent, found = world.sync("v1")
    assert world.exact(found) and world.sender.last.base == "v1"
    assert {p.count for name, _ in sent if (p := wire.of_patch(name))} == {1}
    world.sync("v2")
    assert world.sender.last.changed == 0
    world.weights = fine  # and back, which nobody asks for
    _, found = world.sync("v3")
    assert world.exact(found)


@pytest.mark.parametrize("fault", ["lost", "repeated", "reordered", "restarted", "new"])
def test_a_patch_of_another_version_is_refused_before_anything_is_loaded(fault):
    world = World()
    world.sync(None)
    streams = []
    for _ in range(3):
        world.train(0.02)
        streams.append(world.stream(f"v{world.number}"))
        world.sender.sent()
    assert world.take(streams[0]) is not None
    if fault == "lost":
        wrong = streams[2]
    elif fault == "repeated":
        wrong = streams[0]
    elif fault == "reordered":
        assert world.take(streams[1]) and world.take(streams[2])
        wrong = streams[1]
    else:
        world.receiver = Receiver()
        wrong = streams[1]
    assert world.take(wrong) is None
    assert "a patch leads from version v" in world.receiver.refused
    assert world.receiver.version is None
    world.number += 10
    _, found = world.sync(None)  # the answer
    assert world.exact(found) and not world.receiver.refused
    world.train(0.02)
    _, found = world.sync(f"v{world.number}")
    assert world.exact(found)


@pytest.mark.parametrize("fault", ["value", "gap", "missing", "cut", "table", "stranger", "whole"])
def test_a_patch_that_arrives_damaged_is_refused_before_anything_is_loaded(fault):
    world = World()
    world.sync(None)
    world.train(0.02)
    world.weights["scale"] = torch.tensor(4.0)
    sent = world.stream("v1")
    at = next(i for i, (name, _) in enumerate(sent) if wire.of_patch(name))
    name, data = sent[at][0], sent[at][1].clone()
    if fault == "value":
        data[1] ^= 1
    if fault == "gap":
        count = wire.of_patch(name).count
        data[-(-2 * count // 16) * 16] ^= 1
    sent[at] = (name, data)
    if fault == "missing":
        del sent[at]
    if fault == "cut":
        sent = sent[:-1]
    if fault == "table":
        sent[-1] = (sent[-1][0], sent[-1][1].clone())
        sent[-1][1][20] ^= 1
    if fault == "stranger":
        sent[at] = (wire.Patched("unknown", 1, 1, "bfloat16").name(), data)
    if fault == "whole":
        at = next(i for i, (name, _) in enumerate(sent) if name == "scale")
        sent[at] = ("scale", torch.tensor(5.0))
    assert world.take(sent) is None
    assert "is not what was sent" in world.receiver.refused and world.receiver.version is None


def test_a_refused_patch_is_taken_to_its_end():
    """A transfer of which one end stops would leave the other waiting."""
    world = World()
    world.sync(None)
    world.train(0.02)
    sent, seen = world.stream("v1"), []

    async def counted():
        for item in sent:
            seen.append(item)
            yield item

    assert asyncio.run(Receiver().take(counted())) is None
    assert len(seen) == len(sent)


def test_a_stream_without_versions_passes_and_ends_the_copy():
    world = World()
    world.sync(None)
    found = world.take(list(world.weights.items()))
    assert [name for name, _ in found] == list(world.weights) and world.receiver.version is None
    assert world.take([]) == []


def test_two_weights_of_one_name_are_an_error():
    one = torch.ones(3)
    with pytest.raises(ValueError, match="twice comes twice in one sync"):
        list(Sender().stream([("twice", one), ("twice", one)], "v1", None))
