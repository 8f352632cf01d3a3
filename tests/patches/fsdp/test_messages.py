"""The audit's own messages, and the words it finds for what it sees."""

import pytest
import torch
from standin_streams import Accelerator

from flashpatch.patches._shared import tensor_message
from flashpatch.patches.fsdp import fingerprints as messages
from flashpatch.patches.fsdp.fingerprints import Background, Seen, differences, shortened

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [0, 3, 20_000])
def test_a_message_arrives_in_pieces_that_fit_any_bucket(number):
    content = {f"model.layers.{i}.weight": [i * 7919, "torch.bfloat16"] for i in range(number)}
    pieces = list(messages.closing(content, CPU))
    assert all(messages.ours(name) and tensor.dtype == torch.uint8 for name, tensor in pieces)
    assert len({name for name, _ in pieces}) == len(pieces)
    assert all(tensor.numel() % 512 == 0 and tensor.numel() <= 1 << 16 for _, tensor in pieces)
    message = tensor_message.Message()
    answers = [message.add(name, tensor) for name, tensor in reversed(pieces)]
    assert answers[:-1] == [None] * (len(pieces) - 1) and answers[-1] == content


def test_a_damaged_message_is_no_message():
    ((name, tensor),) = messages.opening({"sync": 1}, CPU)
    tensor[14] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        tensor_message.Message().add(name, tensor)


def seen(first: int, shape: tuple[int, ...] = (2,), dtype: str = "torch.float32") -> Seen:
    return Seen(shape, dtype, (first, 0))


def test_what_differs_is_named():
    sent = {"a": seen(1), "b": seen(2), "c": seen(3), "d": seen(4), "e": seen(5), "f": seen(6), "g": seen(7)}
    assert differences(sent, dict(sent)) == []
    arrived = {name: seen(at) for name, at in dict(a=1, b=9, c=4, d=40, h=8, i=9).items()}
    arrived |= {"e": seen(5, (1, 2)), "f": seen(6, dtype="torch.float16")}
    found = differences(sent, arrived, twice=["a"], excused=["i"], before={"d": seen(40)})
    assert found == [
        "a arrived twice",
        "b has other values than the trainer's shards",
        "c has the values of d",
        "d is stale: it has the values of the sync before",
        "e has shape [1, 2], the trainer's has [2]",
        "f has dtype torch.float16, the trainer sent torch.float32",
        "g is missing",
        "h is extra: the trainer sent none of that name",
    ]
    assert shortened(found).endswith("; and 2 more") and shortened(found[:2]).count(";") == 1


def test_a_table_survives_json():
    one = Seen((3, 4), "torch.bfloat16", ((1 << 64) - 1, 12345678901234567890))
    (piece,) = messages.closing({"sent": {"x": one.as_json()}}, CPU)
    assert Seen.of_json(tensor_message.Message().add(*piece)["sent"]["x"]) == one


def test_a_large_tensor_is_read_on_the_stream_that_waits_for_its_sender(monkeypatch):
    """vLLM with several ranks, and SGLang, work on a stream that is not the one on which a thread begins."""
    accelerator, background = Accelerator(monkeypatch), Background()
    with accelerator.stream(accelerator.Stream("engine's")):
        for words in (1, 1 << 18):
            background.submit(torch.empty(words), accelerator.note, "read").result()
    background.close()
    assert [line for line in accelerator.log if "read" in line] == ["read on engine's"] * 2
