import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm
from eagle_samples import equal, sample
from machine import limit
from tree import SUPPORT

from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter


def _eventually(condition, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + limit(timeout)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _python(code: str, folder: Path) -> warm.Process:
    """Run ``code``, whose first argument is the folder, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    return warm.popen(warm.TORCH, ["-c", f"import sys\n{code}", str(folder)], env=env, cwd=folder.parent)


def test_samples_come_out_as_they_went_in_and_in_order(tmp_path):
    writer, reader = SampleWriter(tmp_path / "queue"), SampleReader(tmp_path / "queue")
    assert reader.read_samples(3) == []
    sent = [sample(seed=seed) for seed in range(5)]
    assert all(writer.offer(one) for one in sent)
    writer.close()
    assert len(reader.waiting()) == 5
    got = reader.read_samples(2) + reader.read_samples(9)
    assert all(map(equal, got, sent)) and len(got) == 5
    assert os.listdir(tmp_path / "queue") == []
    assert (tmp_path / "queue").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("bound", [dict(slots=3), dict(bytes=4 * sample(n=2000).bytes)])
def test_without_a_reader_the_queue_keeps_the_newest_and_its_bound(tmp_path, bound):
    writer = SampleWriter(tmp_path, waiting=100, **bound)
    for seed in range(20):
        writer.offer(sample(n=2000, seed=seed))
    writer.close()
    kept = SampleReader(tmp_path).read_samples(100)
    assert len(kept) == 3 and kept[-1].version == 19
    assert writer.counts["written"] == 20 and writer.counts["evicted"] == 20 - len(kept)


def test_few_of_the_writes_list_the_queue_and_its_bound_holds(tmp_path, monkeypatch):
    """Nobody reads while a batch is generated, so that is how a job runs: 300 writes to a queue of 256 that is full."""
    looks, most, scan = [], 0, os.scandir
    writer = SampleWriter(tmp_path, slots=256, waiting=1000)
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scan(path))
    for number, expected in ((80, 10), (176, 256), (300, 220)):
        looks.clear()
        for seed in range(number):
            writer.offer(sample(seed=seed))
            most = max(most, len(os.listdir(tmp_path)))
        _eventually(lambda: writer.counts["written"] == writer.counts["offered"])
        assert 0 < len(looks) < expected
    writer.close()
    kept = len(SampleReader(tmp_path).waiting())
    assert most <= 256 + 1 and 256 - 32 <= kept <= 256, "one may be under way"
    assert writer.counts["evicted"] == 556 - kept


def test_a_writer_that_cannot_keep_up_drops_and_gives_the_memory_back(tmp_path, monkeypatch):
    stuck_now, go_on = threading.Event(), threading.Event()

    class Stuck(type(sample())):
        def save(self, path):
            stuck_now.set()
            assert go_on.wait(limit(60))
            super().save(path)

    released = []
    writer = SampleWriter(tmp_path / "queue", waiting=2)
    stuck = Stuck(**vars(sample()))
    assert writer.offer(stuck)
    assert stuck_now.wait(limit(60))
    # Who offers must never wait, not even for a moment: any wait for room is an error here.
    with monkeypatch.context() as inside:
        inside.setattr(writer._queue.not_full, "wait", lambda *_: pytest.fail("offer waits for room"))
        answers = [
            writer.offer(sample(seed=seed), lambda seed=seed: released.append(seed)) for seed in range(6)
        ]
    assert answers == [True, True, False, False, False, False] and released == [2, 3, 4, 5]
    assert writer.counts["dropped"] == 4
    go_on.set()
    writer.close()
    assert sorted(released) == list(range(6))


def test_memory_is_not_released_before_it_is_written(tmp_path):
    one, go = sample(), threading.Event()
    writer = SampleWriter(tmp_path)
    writer.offer(one, lambda: (one.hidden.zero_(), go.set()))
    assert go.wait(limit(60))
    writer.close()
    assert equal(SampleReader(tmp_path).read_samples(1)[0], sample())


def test_a_full_disk_costs_samples_only(tmp_path):
    """A file-size limit stands for the full disk: the same OSError from the same write."""
    code = """
import resource, signal
from eagle_samples import sample
from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = SampleWriter(sys.argv[1])
writer.offer(sample(seed=1)); writer.close(60)
resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
writer = SampleWriter(sys.argv[1])
print([writer.offer(sample(n=500, seed=seed)) for seed in (2, 3)])
writer.close(60)
print(dict(writer.counts), writer.problem)
"""
    process = _python(code, tmp_path)
    assert process.wait(limit(60)) == 0
    out = process.stdout.read()
    assert "[True, True]" in out
    assert "'failed': 2" in out and "File too large" in out
    assert [one.version for one in SampleReader(tmp_path).read_samples(9)] == [1]
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_used_costs_samples_only(tmp_path):
    (tmp_path / "queue").write_text("a file, where the queue should be")
    writer = SampleWriter(tmp_path / "queue")
    assert writer.offer(sample())
    writer.close()
    assert writer.counts["failed"] == 1 and "is not a directory of this user" in writer.problem


def test_a_sample_larger_than_the_queue_is_lost_alone(tmp_path):
    writer = SampleWriter(tmp_path, bytes=4096)
    writer.offer(sample(seed=1))
    writer.offer(sample(n=2000, seed=2))
    writer.close()
    assert writer.counts["failed"] == 1
    assert [one.version for one in SampleReader(tmp_path).read_samples(9)] == [1]


def test_the_directory_may_vanish_while_writing(tmp_path):
    writer = SampleWriter(tmp_path / "queue")
    for seed in range(200):
        writer.offer(sample(seed=seed))
        if seed % 20 == 0 and (tmp_path / "queue").exists():
            os.rename(tmp_path / "queue", tmp_path / f"gone-{seed}")
    writer.close()
    assert writer.offer(sample()) is False  # closed
    assert writer.counts["offered"] == 201


def test_corrupt_files_are_skipped_counted_and_deleted(tmp_path):
    writer = SampleWriter(tmp_path)
    for seed in range(3):
        writer.offer(sample(seed=seed))
    writer.close()
    first, second, _ = sorted(tmp_path.iterdir())
    first.write_bytes(b"\0" * 100)
    second.write_bytes(second.read_bytes()[:-1])
    reader = SampleReader(tmp_path)
    assert [one.version for one in reader.read_samples(9)] == [2]
    assert reader.counts["corrupt"] == 2 and os.listdir(tmp_path) == []


def test_two_readers_never_get_the_same_sample(tmp_path):
    writer = SampleWriter(tmp_path, waiting=200)
    for seed in range(100):
        writer.offer(sample(seed=seed))
    writer.close()
    got: list[int] = []

    def read(reader: SampleReader) -> None:
        while some := reader.read_samples(1):
            got.extend(one.version for one in some)

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, [SampleReader(tmp_path), SampleReader(tmp_path)]))
    assert sorted(got) == list(range(100))


WRITE = """
from eagle_samples import sample
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter
writer, seed = SampleWriter(sys.argv[1], slots=50), 0
while True:
    seed += writer.offer(sample(n=400, seed=seed))
"""
READ = """
from flashpatch.patches.eagle.capture.sample_queue import SampleReader
reader = SampleReader(sys.argv[1])
while True:
    for one in reader.read_samples(5):
        print(one.version, flush=True)
"""


def test_either_side_may_be_killed_at_any_time(tmp_path):
    writer, reader = _python(WRITE, tmp_path), _python(READ, tmp_path)
    try:
        assert reader.stdout.readline()
        os.kill(reader.pid, signal.SIGKILL)  # the writer goes on, bounded
        reader.wait(limit(60))
        later = max(os.listdir(tmp_path))
        _eventually(lambda: max(os.listdir(tmp_path)) > later)
        assert len([name for name in os.listdir(tmp_path) if not name.startswith(".")]) <= 51
        reader = _python(READ, tmp_path)  # another reader takes over
        assert reader.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(limit(60))
        _eventually(lambda: not [name for name in os.listdir(tmp_path) if not name.startswith(".")])
        assert reader.poll() is None
        reader.kill()
        reader.wait(limit(60))
        held = [name for name in os.listdir(tmp_path)]
        assert all(name.startswith((".write", ".take", ".tmp")) for name in held)
        for name in held:
            os.utime(tmp_path / name, (1.0, 1.0))
        again = SampleWriter(tmp_path)  # a new writer cleans up after dead ones once what they left is old
        again.offer(sample())
        again.close()
        assert not set(held) & set(os.listdir(tmp_path))
    finally:
        for process in (writer, reader):
            process.kill()
            process.wait(limit(60))


def test_what_safetensors_leaves_when_it_is_killed_is_deleted_too(tmp_path):
    """It writes beside the file under a name of its own and renames, from 0.8 on."""
    writer = SampleWriter(tmp_path)
    (tmp_path / ".tmpA1b2C3").write_bytes(b"half")
    os.utime(tmp_path / ".tmpA1b2C3", (1.0, 1.0))
    writer.offer(sample())
    writer.close()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_nodes_with_equal_process_ids_share_a_directory(tmp_path, monkeypatch):
    """Each writes its samples, and neither deletes what the other is writing."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    writers = [SampleWriter(tmp_path), SampleWriter(tmp_path)]  # of one process id, at one time
    midway = tmp_path / ".write-node.2147483647.abcd-0"  # whose process id is no process of this node
    midway.write_bytes(b"half")
    for writer, seed in zip(writers, (1, 2), strict=True):
        writer.offer(sample(seed=seed))
        writer.close()
        assert writer.counts["written"] == 1 and writer.counts["failed"] == 0, writer.problem
    assert midway.exists()
    got = SampleReader(tmp_path).read_samples(9)
    assert len(got) == 2 and {one.version for one in got} == {1, 2}


def _others(folder: Path) -> Path:
    """Make a directory and a link to it: what is behind a link may be another user's."""
    folder.mkdir(mode=0o700)
    link = folder.with_name("link")
    link.symlink_to(folder)
    return link


def _open(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.mark.parametrize("made", [_others, _open])
def test_a_directory_that_is_not_private_is_neither_written_nor_read(tmp_path, caplog, made):
    given = made(tmp_path / "queue")
    writer = SampleWriter(given)
    writer.offer(sample())
    writer.close()
    assert writer.counts["failed"] == 1 and "captured samples are lost" in caplog.text
    assert str(given) in writer.problem and not list((tmp_path / "queue").iterdir())
    sample().save(tmp_path / "queue" / f"{1:020d}-1-0.safetensors")
    assert SampleReader(given).read_samples(1) == [] and "no samples are read" in caplog.text
