"""Name the calls that an engine's workers answer, the same for every engine.

``UPDATE`` (path, version) loads drafter weights; ``FLUSH`` () returns counts of the capture and, from the rank that
follows acceptance, ``drafter`` (version), ``drafter_path`` and ``acceptance``; ``SAVE_EMBEDDINGS`` (folder) writes the
target's token embeddings and head.

If verl's server counts drafts itself, its first answer to ``FLUSH`` has ``REQUESTS`` and, as means over them,
``ACCEPT_RATE`` (accepted per drafted tokens) and ``ACCEPT_LENGTH`` (1 + accepted tokens per verification)."""

from __future__ import annotations

UPDATE = "eagle_update_drafter"
FLUSH = "eagle_flush"
SAVE_EMBEDDINGS = "eagle_save_embeddings"

REQUESTS = "spec_requests"
ACCEPT_RATE, ACCEPT_LENGTH = "rollout/spec_accept_rate", "rollout/spec_accept_length"  # verl's names
