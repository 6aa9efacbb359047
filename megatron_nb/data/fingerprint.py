"""Whether the data of a resumed run are those of its checkpoint: an order goes on only over the same rows and settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


def same_data(step: int, then: Mapping[str, str], now: Mapping[str, str], changed: str) -> bool:
    """True when the fingerprints are equal; False, and a warning, when they differ and `changed` is "restart".

    step: of the checkpoint. Raises ValueError when they differ and `changed` is "error".
    """
    found = "; ".join(
        f"{key}: {then.get(key, 'absent')} then, {now.get(key, 'absent')} now"
        for key in sorted(then | now)
        if then.get(key) != now.get(key)
    )
    if found and changed == "error":
        raise ValueError(
            f"the data differ from those of the checkpoint at step {step} ({found}): resuming would repeat and skip rows; "
            "restore the data and settings, or set data.changed=restart to begin the new order at its start"
        )
    if found:
        log.warning("DATA CHANGED since the checkpoint at step %d (%s): the order begins anew at its start", step, found)
    return not found
