"""A rollout worker that fails in its second weight update, as ``TRANSFER_FAULT`` says: ``raise`` or ``kill``."""

import os
import signal

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Faulty(vLLMColocateWorkerExtension):
    """Given to verl as ``rollout.engine_kwargs.vllm.worker_extension_cls``."""

    _flashpatch_updates = _flashpatch_buckets = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        self._flashpatch_updates += 1
        self._flashpatch_buckets = 0
        return vLLMColocateWorkerExtension.update_weights_from_ipc(self, *args, **kwargs)

    def _update_weights(self, *args, **kwargs):
        self._flashpatch_buckets += 1
        if self._flashpatch_updates == 2 and self._flashpatch_buckets == 2:
            if os.environ["TRANSFER_FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("cannot place this tensor")
        return vLLMColocateWorkerExtension._update_weights(self, *args, **kwargs)
