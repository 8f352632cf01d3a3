"""A Ray cluster of three raylets on this machine, each with a run directory of its own, and jobs on it.

As a script it runs the cluster: it prints one line of JSON with the cluster's address, and ends with its standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_lab
from machine import limit

NODES = ("head", "one", "two")

CORE = "def plain(x):\n    return x + 1\n"

FAMILY = """
from flashpatch import Family, Patch
def patched(original, *args):
    return ("patched", original(*args))
FAMILY = Family("toy", "one patch", (
    Patch("toy.fakefw.plain", ("fakefw.core:plain",), "fakefw>=1", "why", "how", "remove when",
          wrapper=patched, evidence="update", tested=("1.2.0",)),
))
"""

JOB = """
import json, os, subprocess, sys
import ray
ray.init(address=os.environ["CLUSTER"], log_to_driver=False)
CHILD = '''
from fakefw.core import plain
plain(1)
from flashpatch import ledger
ledger.role("engine-core")
ledger.flush()
print("up", flush=True)
input()
'''
class Actor:
    def work(self, child):
        from fakefw.core import plain
        from flashpatch import ledger
        seen = plain(1)
        ledger.role("worker")
        ledger.note(updates=1)
        ledger.event("update", outcome="committed", version=3, seconds=0.1)
        found = {"pid": os.getpid(), "seen": list(seen), "node": ray.get_runtime_context().get_node_id()}
        if child:
            self.child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True)
            assert self.child.stdout.readline().strip() == "up"
            found["child"] = self.child.pid
        return found
Actor = ray.remote(Actor)
actors = {}
for line in sys.stdin:
    name = line.strip()
    actor = Actor.options(resources={name.partition("-")[0]: 0.1}, num_cpus=0).remote()
    actors[name] = actor
    found = ray.get(actor.work.remote(name == "one"))
    print(json.dumps({**found, "driver": os.getpid(), "run": os.environ.get("FLASHPATCH_RUN")}), flush=True)
"""


class Nodes:
    """The cluster, and the directory that holds what its nodes write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._site = folder / "site"
        self._jobs: list[Job] = []
        self._make_site()
        line = ""
        for _ in range(3):  # Ray gives each raylet half a minute, however busy the machine is
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            command = [sys.executable, __file__, str(folder)]
            self._process = subprocess.Popen(command, env=self.environment(), **pipes)
            line = self._process.stdout.readline()
            if line:
                break
            self._process.communicate()
        told = json.loads(line)
        self.address: str = told["address"]
        self.raylets: dict[str, int] = told["raylets"]

    def environment(self, **extra: str) -> dict[str, str]:
        """Return an environment without a ledger directory in it, and with ``extra``."""
        path = os.pathsep.join((str(self._site), str(Path(__file__).parent)))
        clean = cpu_lab.environment(self.folder, PYTHONPATH=path, FLASHPATCH_CACHE="0")
        del clean["FLASHPATCH_LEDGER"]
        return {**clean, **extra}

    def ledger(self, name: str) -> Path:
        """Return the ledger of a node, or of another name."""
        return self.folder / name / "ledger"

    def start(self, name: str = "driver", **extra: str) -> Job:
        """Start a job whose driver keeps its files in the directory ``name``."""
        cache = self.folder / name / "cache"
        own = {"CLUSTER": self.address, "FLASHPATCH": "toy", "XDG_CACHE_HOME": str(cache)}
        self._jobs.append(Job(self.environment(**own, **extra)))
        return self._jobs[-1]

    def kill(self, name: str, *pids: int) -> None:
        """End a node as a power cut does: its raylet and the processes that run on it."""
        for pid in (*pids, self.raylets.pop(name)):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the cluster, and jobs that a failed test left."""
        for job in self._jobs:
            job.kill()
        self._process.communicate(timeout=limit(60))

    def _make_site(self) -> None:
        entry = "[flashpatch.patches]\ntoy = toys:FAMILY\n"
        for path, text in {
            "fakefw/__init__.py": "",
            "fakefw/core.py": CORE,
            "toys.py": FAMILY,
            "fakefw_cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: fakefw-cpu\nVersion: 1.2.0\n",
            "fakefw_cpu.dist-info/RECORD": "fakefw/__init__.py,,\n",
            "toys.dist-info/METADATA": "Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n",
            "toys.dist-info/entry_points.txt": entry,
        }.items():
            file = self._site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


class Job:
    """A driver that starts an actor wherever it is told to."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = subprocess.Popen([sys.executable, "-c", JOB], env=environment, **pipes)

    def actor(self, name: str) -> dict[str, Any]:
        """Start an actor that calls the patched function, on the node that its name begins with; ``one``'s has a
        child that is not connected to Ray. Returns ``pid``, ``child``, ``seen``, ``node``, ``driver`` and ``run``."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):  # Ray reports dead nodes there
            line = self._process.stdout.readline()
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        self._process.communicate(timeout=limit(60))
        return self._process.returncode


def until(look: Callable[[], Any], seconds: float = 30) -> Any:
    """Return what ``look`` gives once it is true."""
    end = time.monotonic() + limit(seconds)
    while not (found := look()):
        assert time.monotonic() < end, f"nothing within {limit(seconds):.0f} s"
        time.sleep(0.2)
    return found


def _main(folder: Path) -> None:
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    raylets = {}
    for name in NODES:
        times = {"initial_delay_ms": 0, "period_ms": 500, "failure_threshold": 3}
        detection = {f"health_check_{key}": value for key, value in times.items()}
        node = cluster.add_node(
            num_cpus=1,
            resources={name: 1},
            node_name=name,
            object_store_memory=80_000_000,
            include_dashboard=False,
            env_vars={}
            if name == "head"
            else {"FLASHPATCH_LEDGER": str(folder / name / "ledger"), "HOME": "/dev/null/home"},
            **({"_system_config": detection} if name == "head" else {}),
        )
        # else each ray.init() on this machine that names no cluster would join this one
        Path(get_ray_address_file(None)).unlink(missing_ok=True)
        raylets[name] = node.all_processes["raylet"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
