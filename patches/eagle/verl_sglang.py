"""Reach SGLang's schedulers from verl's driver, and give verl SGLang's counts of accepted drafts.

A group of its own, checked when verl imports its code for SGLang."""

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


@patches.wrap(
    f"{SERVER}.generate",
    relies_on=(
        "self.tokenizer_manager.generate_request",
        "extra_fields",
        "verl.workers.rollout.replica:TokenOutput.extra_fields",
    ),
    when="anywhere=eagle.verl.update_weights anywhere=eagle.sglang.init_weight_updater",
    why="Under its MTP drafter verl reads spec_draft_token_num and spec_accept_token_num, which SGLang does not return, so that "
    "nothing ever looks accepted.",
    remove_when="verl reads the names that SGLang returns.",
)
async def generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Put SGLang's spec_num_proposed_drafts and spec_num_correct_drafts into a sample where verl counts drafts."""
    seen: dict[str, Any] = {}
    output = await original(_Watched(self, seen), *args, **kwargs)
    if "spec_num_draft_tokens" in output.extra_fields:
        output.extra_fields["spec_num_draft_tokens"] = int(seen.get("spec_num_proposed_drafts") or 0)
        output.extra_fields["spec_num_accepted_tokens"] = int(seen.get("spec_num_correct_drafts") or 0)
    return output


class _Watched:
    """Stand for a server, or its tokenizer manager, during one request and keep the ``meta_info`` of its output.

    A server runs many requests at once, and ``generate`` hands on nothing of ``meta_info``."""

    def __init__(self, inner: Any, seen: dict[str, Any]) -> None:
        vars(self).update(_inner=inner, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _Watched(found, self._seen) if name == "tokenizer_manager" else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    async def generate_request(self, *args: Any, **kwargs: Any) -> Any:
        async for output in self._inner.generate_request(*args, **kwargs):
            self._seen.update(output.get("meta_info") or {})
            yield output
