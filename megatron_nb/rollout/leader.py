"""What one rank leads, the others share: its values, and its errors."""

from __future__ import annotations

import pickle
import traceback

import torch.distributed as dist


def of_leader[T](value: T, group: dist.ProcessGroup | None) -> T:
    """Rank 0's value on every rank of the group; None is a group of one."""
    if group is None:
        return value
    message = [value]
    dist.broadcast_object_list(message, group=group, group_src=0)
    return message[0]


def raise_on_every_rank(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Collective. Raise rank 0's error on every rank; nothing when it has none."""
    told = of_leader(portable(error), group)
    if error is not None:  # the error itself, with its causes
        raise error
    if told is not None:
        raise told


def portable(error: BaseException | None) -> BaseException | None:
    """The error in a form that reaches other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
