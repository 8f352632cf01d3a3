"""Carry kept tokens from an agent loop's log-probabilities into its sample."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.patches.fp8.support.kept import table
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.arming.site import Site

FIELD = "kept_ids"
"""A sample's field: ``(tokens of the response, support)``, int32."""

LOOP = "verl.experimental.agent_loop.agent_loop"
_HELD = "_flashpatch_kept_ids"


def apply(site: Site) -> None:
    """Wrap ``as_dict``, and give the class a constructor: pydantic's makes plain numbers of log-probabilities."""
    inherited = site.owner.__init__

    @functools.wraps(inherited)
    def construct(self: Any, /, **data: Any) -> None:
        inherited(self, **data)
        width, logprobs = engine.options("fp8")["support"], data.get("response_logprobs")
        if width and isinstance(logprobs, list):
            self.__dict__[_HELD] = table(logprobs, width)

    site.wrap(on_dict)
    site.owner.__init__ = construct


def undo(site: Site) -> None:
    """Take both out again."""
    if "__init__" in vars(site.owner):
        del site.owner.__init__
    site.unwrap()


def on_dict(original, self) -> dict[str, Any]:
    """Around ``AgentLoopOutput.as_dict``, whose result is the sample: add the ids of its tokens."""
    import torch

    fields, width = original(self), engine.options("fp8")["support"]
    if width:  # every sample has the field, or a batch could not be made of them
        found = self.__dict__.get(_HELD)
        rows = table([0.0] * len(fields["responses"]), width) if found is None else found
        fields[FIELD] = torch.from_numpy(rows)
    return fields


PATCH = Patch(
    id="fp8.verl.agent_loop_output_as_dict",
    targets=(f"{LOOP}:AgentLoopOutput.as_dict",),
    requires="verl>=0.9",
    wrapper=on_dict,
    apply=apply,
    undo=undo,
    contract=Contract(
        params=("self",),
        mentions=("self.model_dump", "response_logprobs"),
        exists=(f"{LOOP}:AgentLoopOutput.response_logprobs",),
    ),
    evidence="optional",
    when="support!=0 anywhere=fp8.verl.validate_config_correction",
    scope=frozenset({"driver"}),
    why="verl's agent loops carry a token's log-probability to the trainer, and nothing of what it was drawn from.",
    how="With the option support, takes the kept ids from the log-probabilities that they came with, whichever agent loop "
    "put them together, and adds them to the sample as a field of its own.",
    remove_when="verl carries sampling masks.",
)
