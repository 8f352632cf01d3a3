"""Reach SGLang's schedulers from verl's driver. A group of its own, checked when verl imports its code for SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.sglang import commands

SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer"
_METHOD = "flashpatch_eagle_call"

patches = Patches("eagle", "verl>=0.9", framework="verl_sglang", scope="driver")


@patches.register(
    SERVER,
    relies_on=(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.get_internal_state",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop",
    ),
    evidence="optional",  # a job without co-training calls nothing
    why="verl's server for SGLang has no call to its schedulers that returns their answers.",
    remove_when=UNTIL_VERL,
)
def sg_lang_http_server(site: Site) -> Callable[[], None]:
    """Add a method that sends the family's calls and returns each rank's answer."""
    server = site.original  # verl has made no Ray actor of it yet
    setattr(server, _METHOD, eagle_call)

    def take_away() -> None:
        if vars(server).get(_METHOD) is eagle_call:
            delattr(server, _METHOD)

    return take_away


async def eagle_call(self, method: str, arguments: tuple) -> list[Any]:
    """Call a command of `flashpatch.patches.eagle.drafter_refit.commands` in the schedulers of verl's
    ``SGLangHttpServer``, that of the replica's first node, with arguments that JSON can hold; return each rank's
    answer. Raises PatchError if a rank refused, or the schedulers carry no FlashPatch."""
    manager = self.tokenizer_manager
    manager.auto_create_handle_loop()
    [output, *_] = await manager.get_internal_state_communicator(commands.request(method, arguments))
    return commands.answers(output.internal_state, method)


def start_call(server: Any, method: str, arguments: tuple) -> Any:
    """Call a command through verl's server actor; return Ray's reference to the ranks' answers."""
    return getattr(server, _METHOD).remote(method, arguments)
