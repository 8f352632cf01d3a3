"""Run the engines of the probes of updates and of LoRA adapters, one that is updated and one that is fresh."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.fp8.tiny import ADAPTERS, MERGED

POLICY = "policy"
"""The name that all adapters have in turn."""
TOLD = {
    "before": "an engine is open",
    "identity": "it was sent the weights that it has",
    "perturbation": "it was sent other weights",
    "return": "it has loaded the first ones from disk",
}


def updates(workdir: Path, seen: dict[str, Any]) -> None:
    """Open model a and update it to a, to b and back through three entry points."""
    a, b, began = workdir / "a", workdir / "b", time.monotonic()
    engine = jobs.engine().Engine(a)
    seen |= {"answers": {}, "seconds": {}, "looks": [], "precision": engine.precision()}
    jobs.write(workdir / "precision", seen["precision"])
    steps: dict[str, Callable[[], None]] = {
        "before": lambda: None,
        "identity": lambda: engine.update(a, finish=False),
        "perturbation": lambda: engine.update(b, finish=True),
        "return": lambda: engine.reload(a),
    }
    for step, update in steps.items():
        update()
        seen["answers"][step] = engine.answers()
        seen["looks"].append(engine.look())
        seen["seconds"][step], began = time.monotonic() - began, time.monotonic()
        jobs.tell(workdir, f"{TOLD[step]}, and it answers ({seen['seconds'][step]:.0f} s)")


def fresh(workdir: Path, seen: dict[str, Any]) -> None:
    """Open the other model in the precision of the job, without FlashPatch."""
    engine = jobs.engine()
    getattr(import_module(engine.NAME), engine.ENTRY)  # imports, while the job opens its engine
    keywords = json.loads(jobs.wait_for(workdir / "precision"))
    seen["answers"] = engine.Engine(workdir / jobs.FRESH, stock=True, **keywords).answers()


def adapters(workdir: Path, seen: dict[str, Any]) -> None:
    """Update the base, send each adapter in turn under one name, then one that does not fit."""
    engine = jobs.engine().Engine(workdir / "a", adapters=1)
    engine.update(workdir / "b", finish=True)
    jobs.tell(workdir, "an engine is open, and its base model was updated")
    answers = seen["answers"] = {}
    for name in ADAPTERS:
        engine.load_adapter(POLICY, workdir / name)
        answers[name] = engine.answers(POLICY)
        jobs.tell(workdir, f"it answers under adapter {name}")
    answers["base"] = engine.answers()
    seen["bad"] = ""
    try:
        engine.load_adapter(POLICY, workdir / "bad")
    except Exception as error:
        seen["bad"] = str(error)
    answers["kept"] = engine.answers(POLICY)


def fresh_adapters(workdir: Path, seen: dict[str, Any]) -> None:
    """Ask an engine that was never updated under each adapter and under none, then one on the merged model."""
    opened = partial(jobs.engine().Engine, stock=True)
    engine = opened(workdir / "b", adapters=len(ADAPTERS))
    answers = seen["answers"] = {}
    for name in ADAPTERS:
        engine.load_adapter(name, workdir / name)
        answers[name] = engine.answers(name)
    answers["base"] = engine.answers()
    engine.close()
    answers[MERGED] = opened(workdir / MERGED).answers()
