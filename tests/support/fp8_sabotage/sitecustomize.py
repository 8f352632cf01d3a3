"""Breaks FlashPatch, in the ways that $SABOTAGE names, separated by commas, in every process that carries it.

On PYTHONPATH this runs after FlashPatch has hooked its modules and before any of them is imported: `after`
therefore acts on a module that is patched already.
"""

import functools
import multiprocessing.process
import os

import wrapt


def after(module):
    def decorate(function):
        wrapt.register_post_import_hook(function, module)

    return decorate


def removed():
    """The wrapper is gone: somebody restored the original on the class."""

    @after("vllm.v1.worker.gpu_worker")
    def restore(module):
        module.Worker.execute_model = module.Worker.execute_model.__wrapped__


def displaced():
    """Another tool put a function of its own in the place of the wrapper."""

    @after("vllm.v1.engine.core")
    def replace(module):
        def other_tool(self, method, timeout=None, args=(), kwargs=None):
            return self.model_executor.collective_rpc(method, timeout, args, kwargs)

        module.EngineCore.collective_rpc = other_tool


def never_called():
    """The wrapper is in place, but a subclass overrides the method."""

    @after("vllm.v1.worker.cpu_worker")
    def override(module):
        stock = module.Worker.execute_model.__wrapped__
        module.CPUWorker.execute_model = lambda self, *args, **kwargs: stock(self, *args, **kwargs)


def stale_binding():
    """The wrapper is in place, but who calls has the original under a name of its own."""

    @after("vllm.model_executor.model_loader.base_loader")
    def keep(module):
        module.initialize_model = module.initialize_model.__wrapped__


def forked():
    """No sabotage: vLLM forks its processes, as it does on a GPU, in place of starting interpreters that import it."""
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):

        @after(name)
        def fork(module):
            module.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


def core_without_environment():
    """The engine core, and so the worker below it, start without FLASHPATCH."""
    _start_without("EngineCore")


def worker_without_environment():
    """Only the worker starts without FLASHPATCH."""
    _start_without("VllmWorker")


def adapters_dropped():
    """The trainer sends the base alone, as stock verl does through every checkpoint engine but naive."""

    @after("verl.workers.engine_workers")
    def restore(module):
        worker = module.ActorRolloutRefWorker
        worker.update_weights = worker.update_weights.__wrapped__


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
    for way in os.environ["SABOTAGE"].split(","):
        globals()[way]()
