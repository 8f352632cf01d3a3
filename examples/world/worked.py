"""Teach the world's model to answer in steps, so that answers are long, repeat themselves, and are right now and then.

A question is a list of numbers to be sorted. A worked answer takes the smallest number of what is left, line by line:

    31 8 52 -> 8
    31 52 -> 31
    52 -> 52
    Answer: [8, 31, 52]

Reinforcement learning usually starts from such a model, taught on solutions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reward import ANSWER

TASK = "sorting_in_steps"


def numbers(draw: random.Random, least: int = 4, most: int = 6) -> list[int]:
    """Different numbers below 100."""
    return draw.sample(range(100), draw.randint(least, most))


def question(given: list[int]) -> list[dict[str, str]]:
    """The messages of a chat that asks for a list to be sorted."""
    return [{"role": "user", "content": f"Sort in steps: {', '.join(map(str, given))}"}]


def solution(given: list[int]) -> str:
    """The worked answer."""
    left, lines = list(given), []
    for smallest in sorted(given):
        lines.append(f"{' '.join(map(str, left))} -> {smallest}")
        left.remove(smallest)
    return "\n".join([*lines, f"{ANSWER}{sorted(given)}"])


def rows(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Different questions in verl's format."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    while len(found) < count:
        given = numbers(draw)
        found[tuple(given)] = {
            "data_source": TASK,
            "prompt": question(given),
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(sorted(given))},
            "extra_info": {"index": len(found)},
        }
    return list(found.values())


def teach(model: Path, to: Path, steps: int, seed: int, batch: int = 8, rate: float = 2e-4) -> None:
    """Train the checkpoint ``model`` on worked answers, ``batch`` per step, and write it to ``to``."""
    import torch
    import transformers

    torch.manual_seed(seed)
    words = transformers.AutoTokenizer.from_pretrained(model)
    pupil = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    began = time.monotonic()
    for step, (ids, labels) in zip(range(steps), _batches(words, batch, random.Random(seed + 1))):
        loss = pupil(input_ids=ids, attention_mask=(ids != words.pad_token_id).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    pupil.to(torch.bfloat16).save_pretrained(to)
    words.save_pretrained(to)


def _batches(words: Any, batch: int, draw: random.Random) -> Iterator[tuple[Any, Any]]:
    """Token ids [batch, longest] and their labels, -100 outside of the answers."""
    import torch

    while True:
        texts, answers = [], []
        for _ in range(batch):
            given = numbers(draw)
            prompt = words.apply_chat_template(question(given), tokenize=False, add_generation_prompt=True)
            start = words(prompt, add_special_tokens=False)["input_ids"]
            answer = words(solution(given), add_special_tokens=False)["input_ids"] + [words.eos_token_id]
            texts.append(start + answer)
            answers.append(len(answer))
        longest = max(map(len, texts))
        ids = torch.full((batch, longest), words.pad_token_id)
        labels = torch.full((batch, longest), -100)
        for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            ids[row, : len(text)] = torch.tensor(text)
            labels[row, len(text) - answer : len(text)] = torch.tensor(text[-answer:])
        yield ids, labels
