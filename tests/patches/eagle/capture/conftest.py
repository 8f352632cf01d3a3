"""Give a writer the time that a busy machine needs: within an engine it stops after seconds, and loses samples."""

import pytest
from machine import limit


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from flashpatch.patches.eagle.capture.recorder import Recorder
    from flashpatch.patches.eagle.capture.sample_queue import SampleWriter

    for function in (SampleWriter.close, Recorder.close, Recorder.flush):
        assert len(function.__defaults__) == 1, "its time-out"
        monkeypatch.setattr(function, "__defaults__", (limit(60),))
