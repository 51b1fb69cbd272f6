"""Bring the rows of an accepted path to the front of a request's new rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence

from specmla.cache.latent import LatentCache
from specmla.staging import send_arrays
from specmla.verify.judge import Decision
from specmla.verify.plan import PlannedRequest


def move_paths(
    cache: LatentCache,
    block_ids: Callable[[Hashable], Sequence[int]],
    requests: Sequence[PlannedRequest],
    decided: Sequence[Decision],
) -> None:
    """Move the rows of accepted tree nodes, in all layers, to where those of a chain would be.

    A node's row was computed at the position of its depth, so it is right there as it is. All rows
    are read before one is written; only rows that the step itself reserved are.

    Args:
        cache: the target's.
        block_ids: pages of a request, those of the step included.
        requests: of the step.
        decided: for each of them.
    """
    found = {"from": array("q"), "to": array("q")}
    for request, decision in zip(requests, decided, strict=True):
        if request.tree is None or not decision.path:
            continue
        pages, size, anchor = block_ids(request.request_id), cache.page_size, request.position
        for row, source in enumerate(decision.path, start=1):
            if row != source:
                for name, at in (("from", anchor + source), ("to", anchor + row)):
                    found[name].append(pages[at // size] * size + at % size)
    if found["to"]:
        slots = send_arrays(found, cache.device)
        cache.move(slots["from"], slots["to"])
