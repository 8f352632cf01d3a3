"""Count what an engine's thread asks of its device, and its calls and time in FlashPatch's own code."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch
from torch.utils._pytree import tree_leaves

_NO_KERNEL = ("resize_", "set_", "record_stream")
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
_SYNCHRONIZE = tuple((owner, "synchronize") for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event))
_TOOL = 4  # of sys.monitoring


class Launches(dispatch.TorchDispatchMode):
    """Count operators on a device's tensors; a view is none, nor is memory that is only taken, or a copy to meta.

    Attributes:
        seen: operators by name.
        waits: operators and calls by which the host waits for the device.
        touched: bytes of the device's tensors that operators were given or gave.
        host: bytes of the host's tensors that operators gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.touched = self.host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.is_view:
            return found
        given = {id(one): one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = {id(one): one for one in tree_leaves(found) if isinstance(one, torch.Tensor)}
        self.host += sum(one.nbytes for key, one in made.items() if one.is_cpu and key not in given)
        everything = {**given, **made}.values()
        there = [one for one in everything if one.is_cuda]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not there or "empty" in name or name in _NO_KERNEL or any(one.is_meta for one in everything):
            return found
        self.seen[name] += 1
        self.touched += sum(one.nbytes for one in there)
        copies = name in ("copy_", "_to_copy") and any(one.is_cpu and one.dim() for one in everything)
        is_late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        masked = name in ("index", "index_put_") and any(one.dtype is torch.bool for one in there)
        self.waits[name] += name in _WAITS or (copies and not is_late) or masked
        return found


def milliseconds(work: Callable[[], Any], times: int = 3) -> float:
    """Return the median of what work takes by the clock, the device's part too."""
    found = []
    for _ in range(times):
        with clock() as taken:
            work()
        found += taken
    return statistics.median(found)


@contextmanager
def clock() -> Iterator[list[float]]:
    """Time what is done within, on the device too; the milliseconds are appended to what this yields."""
    found: list[float] = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    yield found
    torch.cuda.synchronize()
    found.append(1000 * (time.perf_counter() - began))


@contextmanager
def launches() -> Iterator[Launches]:
    """Count within, also where FlashPatch or vLLM takes torch's modes off."""
    from flashpatch.patches.fp8.update.tensors import Unseen

    counted, off, thread = Launches(), dispatch._disable_current_modes, threading.get_ident()

    @contextmanager
    def still_counting() -> Iterator[Any]:
        with off() as modes, counted:
            yield modes

    def waiting(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted.waits["synchronize"] += threading.get_ident() == thread
            return original(*args, **kwargs)

        return call

    def unseen(self: Unseen) -> None:
        enter(self)
        counted.__enter__()

    def seen_again(self: Unseen, *error: Any) -> None:
        counted.__exit__(*error)
        leave(self, *error)

    users = [one for one in list(sys.modules.values()) if vars(one).get("_disable_current_modes") is off]
    kept = [(owner, name, getattr(owner, name)) for owner, name in _SYNCHRONIZE]
    for module in users:
        module._disable_current_modes = still_counting
    for owner, name, original in kept:
        setattr(owner, name, waiting(original))
    enter, leave = Unseen.__enter__, Unseen.__exit__
    kept += [(Unseen, "__enter__", enter), (Unseen, "__exit__", leave)]
    Unseen.__enter__, Unseen.__exit__ = unseen, seen_again
    try:
        with counted:
            yield counted
    finally:
        for owner, name, original in (*kept, *((one, "_disable_current_modes", off) for one in users)):
            setattr(owner, name, original)


class Own:
    """Follow where a thread enters and leaves FlashPatch's code; what this calls of the framework's is not its own.

    First `calls` counts calls and learns the borders, with Python's profiler; then `microseconds` looks at these alone."""

    def __init__(self, framework: ModuleType) -> None:
        import flashpatch
        import flashpatch.patches

        self._ours = tuple(str(Path(one.__file__).parent) for one in (flashpatch, flashpatch.patches))
        # torch's decorator stands around what vLLM calls, which a patch gets as the original.
        self._theirs = str(Path(framework.__file__).parent), torch.utils._contextlib.__file__
        self._borders: dict[CodeType, bool] = {}

    @contextmanager
    def calls(self) -> Iterator[Counter[str]]:
        """Count within the calls of Python functions, ``all`` and FlashPatch's ``own``."""
        counted, stack = Counter(all=0, own=0), [False]

        def seen(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                file = frame.f_code.co_filename
                own = file.startswith(self._ours) or (stack[-1] and not file.startswith(self._theirs))
                if own != stack[-1]:
                    self._borders[frame.f_code] = own
                counted.update(all=1, own=int(own))
                stack.append(own)
            elif event == "return" and len(stack) > 1:
                stack.pop()

        sys.setprofile(seen)
        try:
            yield counted
        finally:
            sys.setprofile(None)

    @contextmanager
    def microseconds(self) -> Iterator[Callable[[], float]]:
        """Yield a function that returns the time that has passed in FlashPatch's code since it was called last.

        Python looks anew at each function that runs once this begins or ends, so the first steps within take longer."""
        events, clock, borders = sys.monitoring.events, time.perf_counter_ns, self._borders
        spent, since, stack = 0, 0, [False]

        def enter(code: CodeType, offset: int) -> None:
            nonlocal spent, since
            if stack[-1]:
                spent += clock() - since
            stack.append(borders[code])
            since = clock()

        def leave(code: CodeType, offset: int, value: Any) -> None:
            nonlocal spent, since
            if stack[-1]:
                spent += clock() - since
            if len(stack) > 1:
                stack.pop()
            since = clock()

        def passed() -> float:
            nonlocal spent
            found, spent = spent / 1000, 0
            return found

        callbacks = {events.PY_START: enter, events.PY_RESUME: enter, events.PY_RETURN: leave}
        callbacks[events.PY_YIELD] = leave
        sys.monitoring.use_tool_id(_TOOL, "felt")
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(_TOOL, event, callback)
        for code in borders:
            sys.monitoring.set_local_events(_TOOL, code, sum(callbacks))
        try:
            yield passed
        finally:
            for code in borders:
                sys.monitoring.set_local_events(_TOOL, code, 0)
            sys.monitoring.free_tool_id(_TOOL)


def memory() -> Counter[str]:
    """Return the bytes that were asked of torch's allocators so far, on the device and in pinned host memory."""
    host, device = torch.cuda.host_memory_stats(), torch.cuda.memory_stats()
    pinned = host.get("allocated_bytes.allocated", 0)
    return Counter(device=device.get("allocated_bytes.all.allocated", 0), pinned=pinned)
