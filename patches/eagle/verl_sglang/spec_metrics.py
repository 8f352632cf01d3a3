"""Count drafted and accepted tokens per request, under the names that SGLang gives them."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.drafter_refit.commands import ACCEPT_LENGTH, ACCEPT_RATE, REQUESTS
from flashpatch.patches.eagle.verl.targets import DriverPatch
from flashpatch.record import Contract

_COUNTS = "_flashpatch_spec"


async def on_generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``generate``: count the request's drafts, and correct verl's counts under its own MTP drafter."""
    seen: dict[str, Any] = {}
    output = await original(_Watched(self, seen), *args, **kwargs)
    drafted, accepted, verified = counts(seen)
    if verified:
        found = vars(self).setdefault(_COUNTS, [0, 0.0, 0.0])
        found[0] += 1
        found[1] += accepted / drafted if drafted else 0.0
        found[2] += 1 + accepted / verified
    if "spec_num_draft_tokens" in output.extra_fields:
        output.extra_fields["spec_num_draft_tokens"] = drafted
        output.extra_fields["spec_num_accepted_tokens"] = accepted
    return output


def counts(meta_info: dict[str, Any]) -> tuple[int, int, int]:
    """Return drafted and accepted tokens and verifications of one request, from SGLang's ``meta_info``."""
    names = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")
    return tuple(int(meta_info.get(name) or 0) for name in names)


def take(server: Any) -> dict[str, float]:
    """Return and forget the means over the requests since the last call, with their number; empty if none was
    drafted for."""
    requests, rates, lengths = vars(server).pop(_COUNTS, (0, 0.0, 0.0))
    if not requests:
        return {}
    return {REQUESTS: requests, ACCEPT_RATE: rates / requests, ACCEPT_LENGTH: lengths / requests}


class _Watched:
    """Stand for a server during one request and keep the ``meta_info`` of its output.

    A server runs many requests at once, and ``generate`` hands on nothing of ``meta_info``.
    """

    def __init__(self, server: Any, seen: dict[str, Any]) -> None:
        vars(self).update(_server=server, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._server, name)
        return _WatchedManager(found, self._seen) if name == "tokenizer_manager" else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._server, name, value)


class _WatchedManager:
    """Stand for the server's tokenizer manager."""

    def __init__(self, manager: Any, seen: dict[str, Any]) -> None:
        self._manager, self._seen = manager, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *args: Any, **kwargs: Any) -> Any:
        async for output in self._manager.generate_request(*args, **kwargs):
            self._seen.update(output.get("meta_info") or {})
            yield output


PATCH = DriverPatch(
    id="eagle.verl_sglang.generate",
    targets=("verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer.generate",),
    wrapper=on_generate,
    contract=Contract(
        mentions=("self.tokenizer_manager.generate_request", "extra_fields"),
        exists=("verl.workers.rollout.replica:TokenOutput.extra_fields",),
    ),
    evidence="step",
    when="anywhere=eagle.verl.update_weights anywhere=eagle.sglang.init_weight_updater",
    why="verl reads spec_draft_token_num and spec_accept_token_num, which SGLang does not return, so that nothing ever "
    "looks accepted; and it reads them for its own MTP drafter only.",
    how="Counts SGLang's spec_num_proposed_drafts and spec_num_correct_drafts, which the driver logs under verl's names; "
    "under verl's MTP drafter puts them into the sample.",
    remove_when="verl reads the names that SGLang returns.",
)
