"""Breaks FlashPatch, in the way that $SABOTAGE names, in every process that carries it.

On PYTHONPATH this runs after FlashPatch has hooked its modules and before any of them is imported: a hook after an import
therefore acts on a module that is patched already."""

import multiprocessing.process
import os

import wrapt


def core_without_environment():
    """The engine core, and so the worker below it, start without FLASHPATCH."""
    _start_without("EngineCore")


def worker_without_environment():
    """Only the worker starts without FLASHPATCH."""
    _start_without("VllmWorker")


def adapters_dropped():
    """The trainer sends the base alone, as stock verl does through every checkpoint engine but naive."""

    def restore(module):
        worker = module.ActorRolloutRefWorker
        worker.update_weights = worker.update_weights.__wrapped__

    wrapt.register_post_import_hook(restore, "verl.workers.engine_workers")


def _start_without(name):
    original = multiprocessing.process.BaseProcess.start

    def start(self):
        if not self.name.startswith(name):
            return original(self)
        names = os.environ.pop("FLASHPATCH")
        try:
            return original(self)
        finally:
            os.environ["FLASHPATCH"] = names

    multiprocessing.process.BaseProcess.start = start


if os.environ.get("FLASHPATCH"):
    globals()[os.environ["SABOTAGE"]]()
