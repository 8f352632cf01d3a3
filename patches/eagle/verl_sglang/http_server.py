"""Give verl's SGLang server a method that calls the family's commands in the schedulers."""

from __future__ import annotations

from typing import Any

from flashpatch.arming.site import Site
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH
from flashpatch.patches.eagle.sglang import commands
from flashpatch.patches.eagle.verl.targets import DriverPatch
from flashpatch.patches.eagle.verl_sglang import spec_metrics
from flashpatch.record import Contract

SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer"
_METHOD = "flashpatch_eagle_call"


async def eagle_call(self, method: str, arguments: tuple) -> list[Any]:
    """Call a command in the server's schedulers and return each rank's answer.

    Args:
        self: verl's ``SGLangHttpServer``, the one of the replica's first node.
        method: a name of `flashpatch.patches.eagle.drafter_refit.commands`.
        arguments: of the command, as JSON can hold.

    Raises:
        PatchError: a rank refused, or the schedulers carry no FlashPatch.
    """
    manager = self.tokenizer_manager
    manager.auto_create_handle_loop()
    [output, *_] = await manager.get_internal_state_communicator(commands.request(method, arguments))
    found = commands.answers(output.internal_state, method)
    if method == FLUSH and found:
        found[0] = {**found[0], **spec_metrics.take(self)}
    return found


def start_call(server: Any, method: str, arguments: tuple) -> Any:
    """Call a command through verl's server actor; return Ray's reference to the ranks' answers."""
    return getattr(server, _METHOD).remote(method, arguments)


def apply(site: Site) -> None:
    """Add the method to the class, before verl makes Ray actors of it."""
    setattr(site.original, _METHOD, eagle_call)


def undo(site: Site) -> None:
    """Take it away."""
    if vars(site.original).get(_METHOD) is eagle_call:
        delattr(site.original, _METHOD)


PATCH = DriverPatch(
    id="eagle.verl_sglang.sg_lang_http_server",
    targets=(SERVER,),
    apply=apply,
    undo=undo,
    contract=Contract(
        exists=(
            "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.get_internal_state",
            "sglang.srt.managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop",
        ),
    ),
    evidence="optional",  # a job without co-training calls nothing
    why="verl's server for SGLang has no call to its schedulers that returns their answers.",
    how="Adds a method that sends the family's calls and returns each rank's answer.",
)
