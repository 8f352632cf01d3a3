"""Name the calls that an engine's workers answer, the same for every engine.

``UPDATE`` (path, version) loads drafter weights; ``FLUSH`` (whether the caller reads samples) returns counts of the capture
and, from the rank that follows acceptance, ``drafter`` (version), ``drafter_path`` and ``acceptance``; ``SAVE_EMBEDDINGS`` (folder) writes the
target's token embeddings and head."""

from __future__ import annotations

UPDATE = "eagle_update_drafter"
FLUSH = "eagle_flush"
SAVE_EMBEDDINGS = "eagle_save_embeddings"
