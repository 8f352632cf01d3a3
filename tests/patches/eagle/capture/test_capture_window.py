"""One window of every long request: each has the same chance, and the tail its share."""

from collections import Counter

import torch

from flashpatch.patches.eagle.capture.capture_window import CaptureWindow
from flashpatch.patches.eagle.capture.recorder import Recorder
from flashpatch.patches.eagle.capture.sample_queue import SampleReader, SampleWriter


def test_every_window_is_kept_with_the_same_chance():
    found: Counter[int] = Counter()
    for _ in range(4000):
        window = CaptureWindow(size=16)
        for start in range(0, 128, 4):
            window.advance(range(start, start + 4))
        assert window.first % 16 == 0
        found[window.first // 16] += 1
    expected = 4000 / 8
    assert sum((found[place] - expected) ** 2 / expected for place in range(8)) < 24.3  # chi-square, 7, 0.001


def test_short_requests_cached_prefixes_and_positions_that_come_again_draw_nothing():
    window = CaptureWindow(size=512)
    assert not window.advance(range(300)) and not window.advance(range(300, 512)) and window.first == 0
    for _ in range(100):
        window = CaptureWindow(size=16)
        window.advance(range(96, 112))  # what came before was in the cache
        assert window.first == 96
    window = CaptureWindow(size=16)
    window.advance(range(160))
    kept = window.first
    for _ in range(20):
        assert not window.advance(range(160)) and window.first == kept


LENGTH, REQUESTS, CHUNK, WIDTH = 16_384, 256, 128, 4


def test_256_concurrent_requests_of_16k_tokens_all_leave_their_share(tmp_path):
    """The states hold their positions, so that a row at another one shows."""
    recorder = Recorder(SampleWriter(tmp_path, slots=2 * REQUESTS, waiting=1000))
    names = [f"r{number}" for number in range(REQUESTS)]
    for start in range(0, LENGTH, CHUNK):
        positions = torch.arange(start, start + CHUNK).repeat(REQUESTS)
        hidden = positions[:, None].float().repeat(1, WIDTH)
        recorder.step(names, [CHUNK] * REQUESTS, positions % 997, positions, hidden)
        recorder.flush()
    recorder.finish({name: ([position % 997 for position in range(LENGTH)], 1000) for name in names})
    recorder.close()
    assert recorder.counts["lost"] == 0 and recorder.counts["requests"] == REQUESTS
    samples = SampleReader(tmp_path).read_samples(REQUESTS + 1)
    assert len(samples) == REQUESTS
    tail = 0
    for sample in samples:
        seen = sample.hidden[sample.known][:, 0].long()
        first = int(seen[0])
        assert len(sample) == 512 and seen.tolist() == list(range(first, first + len(seen)))
        assert len(seen) >= 511
        assert sample.input_ids.tolist() == [position % 997 for position in range(first, first + 512)]
        assert sample.response.tolist() == [position >= 1000 for position in range(first, first + 512)]
        tail += first >= LENGTH * 3 // 4
    assert 0.15 < tail / REQUESTS < 0.35, "the last quarter has about a quarter of the states"
