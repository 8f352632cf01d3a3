"""Lets one weight update of an SGLang server fail, when the file that SGLANG_FAULT names says how.

With this folder on PYTHONPATH every Python process imports this file. The file holds ``raise``, ``kill`` or ``stop`` and
is removed when the fault has happened: in the second bucket that the model loads after it was written."""

import os
import sys

MODULE = "sglang.srt.models.qwen2"
_buckets = []


def inject(module):
    """Stand before the model's ``load_weights``."""
    original = module.Qwen2ForCausalLM.load_weights

    def load_weights(self, weights, *args, **kwargs):
        path = os.environ["SGLANG_FAULT"]
        if os.path.exists(path):
            _buckets.append(path)
            if len(_buckets) == 2:
                _buckets.clear()
                happen(path)
        return original(self, weights, *args, **kwargs)

    module.Qwen2ForCausalLM.load_weights = load_weights


def happen(path):
    """Fail as the file says."""
    import signal

    with open(path) as file:
        fault = file.read()
    os.remove(path)
    if fault == "raise":
        raise LookupError("cannot place this tensor")
    os.kill(os.getpid(), dict(kill=signal.SIGKILL, stop=signal.SIGSTOP)[fault])


class _Finder:
    """Changes the model's module when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            inject(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SGLANG_FAULT"):
    sys.meta_path.insert(0, _Finder())
