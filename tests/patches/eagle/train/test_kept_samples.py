"""Samples that outlive the trainer that read them."""

import errno
import queue

import pytest
from drafter_lab import capture, make_target
from transformers import AutoModelForCausalLM

from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleReader
from flashpatch.patches.eagle.train import kept_samples
from flashpatch.patches.eagle.train.buffer import Buffer
from flashpatch.patches.eagle.train.kept_samples import KeptSamples
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.worker import Worker


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return capture(make_target(), 6)


def write(queue, samples, first: int = 1) -> None:
    queue.mkdir(exist_ok=True)
    for number, sample in enumerate(samples, first):
        sample.save(queue / f"{number:020d}-1-1.safetensors")


def requests(samples) -> list[str]:
    return [sample.request for sample in samples]


def test_what_was_read_is_there_again(tmp_path, samples):
    queue = tmp_path / "queue"
    write(queue, samples)
    read = KeptSamples(queue, tmp_path / "kept").read_samples(100)
    assert not list(queue.glob("*.safetensors"))
    again = KeptSamples(queue, tmp_path / "kept").read_kept()
    assert requests(again) == requests(read) == requests(samples)
    assert all(one.file.exists() and one.version == 0 for one in again)
    assert all((one.hidden == two.hidden).all() for one, two in zip(again, samples, strict=True))
    assert not SampleReader(queue).read_samples(100), "none is in both places"


def test_files_follow_the_buffer(tmp_path, samples):
    queue = tmp_path / "queue"
    write(queue, samples)
    kept = KeptSamples(queue, tmp_path / "kept")
    buffer = Buffer(samples=3)
    for sample in kept.read_samples(100):
        buffer.add(sample)
    held = {sample.file for sample in buffer.draw(100)}
    assert len(held) == 3 and set((tmp_path / "kept").glob("*")) == held


def test_files_of_old_policies_go(tmp_path, samples):
    queue = tmp_path / "queue"
    write(queue, samples[:2])
    write(queue, capture(make_target(), 1, version=5), first=9)
    buffer = Buffer(versions=2)
    for sample in KeptSamples(queue, tmp_path / "kept").read_samples(100):
        buffer.add(sample)
    assert len(buffer) == 1 == len(list((tmp_path / "kept").glob("*")))


def test_what_is_there_first_is_older_than_any_sample_that_comes(tmp_path):
    """Two jobs with one queue, which count their policies from 0; the first left a sample unread."""
    model, mine = make_target(), tmp_path / "mine"
    for number, place in enumerate((tmp_path / "other", mine)):
        write(place, capture(model, 1, version=100), first=number)
        KeptSamples(place, tmp_path / "kept").read_samples(9)
    write(mine, capture(model, 1, version=100), first=3)
    second, buffer = KeptSamples(mine, tmp_path / "kept"), Buffer(versions=2)
    there = second.read_kept()
    write(mine, capture(model, 2, version=1), first=4)
    for sample in there + second.read_samples(9):
        buffer.add(sample)
    assert sorted(sample.version for sample in buffer.draw(9)) == [0, 0, 0, 1, 1]


def test_a_damaged_file_is_deleted(tmp_path, samples):
    queue = tmp_path / "queue"
    write(queue, samples)
    kept = KeptSamples(queue, tmp_path / "kept")
    kept.read_samples(100)
    damaged = sorted((tmp_path / "kept").glob("*"))[2]
    damaged.write_bytes(damaged.read_bytes()[:90])
    assert requests(kept.read_kept()) == ["r0", "r1", "r3", "r4", "r5"] and not damaged.exists()


def test_a_full_disk_costs_the_files_alone(tmp_path, samples, monkeypatch):
    queue = tmp_path / "queue"
    write(queue, samples)
    kept = KeptSamples(queue, tmp_path / "kept")

    def full(source, target):
        target.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as inside:
        inside.setattr(kept_samples.shutil, "move", full)
        read = kept.read_samples(100)
    assert requests(read) == requests(samples) and all(one.file is None for one in read)
    assert kept.counts["unkept"] == 6 and kept.read_kept() == [] and not list(queue.glob("*"))


def test_a_worker_goes_on_with_the_samples_of_the_one_before(target, tmp_path):
    write(tmp_path / "queue", capture(AutoModelForCausalLM.from_pretrained(target), 6))
    settings = WorkerSettings(str(target), str(tmp_path / "queue"), str(tmp_path / "out"), samples=4)
    first = Worker(settings, lambda event: None, queue.Queue())
    first._read_samples()
    second = Worker(settings, lambda event: None, queue.Queue())
    assert len(second.buffer) == 4
    assert sorted(requests(second.buffer.draw(9))) == sorted(requests(first.buffer.draw(9)))
    assert second._rows()
