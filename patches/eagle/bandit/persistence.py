"""Save what a bandit learned in a file, and restore it in the next run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from flashpatch.atomic_file import replacing
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.policy import Policy

logger = logging.getLogger("flashpatch.eagle")


def save(policy: Policy, path: Path) -> None:
    """Write the policy's state, whole or not at all. A failure is logged, not raised."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(policy.state()))
    except OSError as error:
        logger.warning("what the bandit learned cannot be saved: %s", error)


def restore(policy: Policy, path: Path) -> str:
    """Restore the policy from a file, if there is one.

    Returns:
        ``new``, ``restored`` or ``not restored: ...``, for the ledger. A file that does not fit is logged and
        left as
        it is: the policy starts with nothing learned.
    """
    try:
        policy.restore(json.loads(path.read_text()))
    except FileNotFoundError:
        return "new"
    except (OSError, ValueError, PatchError) as error:
        logger.warning("the bandit starts with nothing learned, %s cannot be used: %s", path, error)
        return f"not restored: {error}"
    return "restored"
