"""What the suite writes is private to its user, as SECURITY.md says, whatever the umask is.

What whole engines and jobs leave behind is walked where they run: `eagle/vllm/test_drafter_refit.py`,
`eagle/train/test_worker.py` and `eagle/verl_vllm/test_job.py`."""

import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eagle_samples import sample
from machine import limit
from private_modes import loose

from flashpatch import registry
from flashpatch.contracts import contract, verdict_cache
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter
from flashpatch.patches.eagle.drafter_refit.embeddings_and_head import save_embeddings_and_head


@pytest.fixture(autouse=True)
def open_umask(tmp_path: Path) -> Iterator[None]:
    tmp_path.chmod(0o700)
    before = os.umask(0)
    yield
    os.umask(before)


def _ledger(at: Path) -> None:
    code = "import flashpatch; from flashpatch import ledger; flashpatch.enable('eagle')\n"
    code += "ledger.event('drafter', what='update'); ledger.flush()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=limit(60))


def _verdicts(at: Path) -> None:
    verdict_cache.check(registry.patch("cpu.torch.init_core_state"), contract.installed_root, "2.13")


def _samples(at: Path) -> None:
    writer = SampleWriter(at / "waiting")
    writer.offer(sample(seed=1))
    writer.close(60.0)
    assert writer.counts["written"] == 1


def _embeddings(at: Path) -> None:
    inner, head = torch.nn.Module(), torch.nn.Linear(4, 8, bias=False)
    inner.embed_tokens = torch.nn.Embedding(8, 4)
    inner.embed_tokens.org_vocab_size = head.org_vocab_size = 8
    model = types.SimpleNamespace(model=inner, lm_head=head)
    assert (
        save_embeddings_and_head(model, at / "shared", lambda weight: weight, True, "eagle.vllm.worker") == 2
    )


def _drafter(at: Path) -> None:
    """As verl's driver writes the first one."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    from flashpatch.patches.eagle.train.drafter import make_drafter
    from flashpatch.patches.eagle.train.drafter_config import drafter_config
    from flashpatch.patches.eagle.train.export import save_drafter
    from flashpatch.verify.probes.eagle import tiny

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.target(Path(folder) / "model")
        config = drafter_config(AutoConfig.from_pretrained(model))
        save_drafter(at / "eagle" / "first", make_drafter(config).state_dict(), config, "sglang")


@pytest.mark.parametrize("write", [_ledger, _verdicts, _samples, _embeddings, _drafter])
def test_what_is_written_is_private(write, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("FLASHPATCH_CACHE", str(tmp_path / "cache"))
    write(tmp_path)
    assert len(list(tmp_path.rglob("*"))) > 0 and loose(tmp_path) == []
