"""The draft-verify loop with the host one step ahead of the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from specmla.bucket import Bucket
from specmla.errors import UnsupportedError
from specmla.verify.captured import Forward
from specmla.verify.captured_overlap import CapturedOverlap
from specmla.verify.overlap import OverlappedStep
from specmla.verify.overlap_plan import DraftsAhead
from specmla.verify.proposal import Drafter, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep


def overlapped_loop(
    step: VerifyStep,
    forward: Forward,
    prompts: Mapping[Hashable, tuple[Sequence[int], SamplingParams]],
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int],
    buckets: Sequence[Bucket] = (),
) -> Iterator[list[RequestResult]]:
    """Continue all prompts together; what `generate` does with `overlap=True`.

    A step is planned and its kernels are enqueued while the one before it runs; only then is that
    one's verdict awaited. The drafter knows the tokens of the step before that.

    Args:
        step: holds the requests.
        forward: gives the logits [R, W] of `plan.logit_rows`; states are not used.
        prompts: tokens and parameters by request name.
        drafter: one that `drafts_ahead`.
        num_drafts: K, for all requests or by request (absent: 0).
        buckets: shapes to capture first; what does not fit runs without a graph.

    Raises:
        UnsupportedError: a drafter that needs to know every committed token.
        ArgumentError: a drafter of another vocabulary, requests that `OverlappedStep` refuses.
    """
    if drafter is not None:
        step.check_drafter(drafter.vocab_size)
        if not getattr(drafter, "drafts_ahead", False):
            reason = (
                f"{type(drafter).__name__} drafts after the last committed token, which the host "
                "does not know yet; accepted are drafters with drafts_ahead, or none"
            )
            raise UnsupportedError("overlap", [reason])
    overlap = OverlappedStep(step)
    kinds = [params for _, params in prompts.values()] or [SamplingParams()]
    lens = [len(tokens) + (p.max_tokens or step.max_seq_len) for tokens, p in prompts.values()]
    graphs = CapturedOverlap(
        overlap, forward, buckets, sampling=kinds, eager=True, history=max(lens, default=None)
    )
    yield from _loop(overlap, graphs, prompts, drafter, num_drafts)


def _loop(
    overlap: OverlappedStep,
    graphs: CapturedOverlap,
    prompts: Mapping[Hashable, tuple[Sequence[int], SamplingParams]],
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int],
) -> Iterator[list[RequestResult]]:
    running: list[Hashable] = []
    try:
        for request_id, (tokens, sampling) in prompts.items():
            overlap.step.add(request_id, tokens, sampling)
            running.append(request_id)
        while running:
            names = [name for name in overlap.ready if name in running]
            if names:
                drafts = _draft(overlap, drafter, num_drafts, names)
                graphs.verify(graphs.plan(drafts, names))
            if names and overlap.num_flying < 2:
                continue
            results = overlap.commit()
            ended = [r.request_id for r in results if r.finish_reason]
            if drafter is not None:
                drafter.observe(results)
                _reset(ended, drafter)
            running = [name for name in running if name not in ended]
            yield results
    finally:  # an error, or a caller that stops early, leaves no request and no page behind
        overlap.drop(running)
        _reset(running, drafter)


def _draft(
    overlap: OverlappedStep,
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int],
    names: Sequence[Hashable],
) -> DraftsAhead | None:
    if drafter is None:
        return None
    wanted = overlap.draft_requests(num_drafts, names, ahead=True)
    proposal = drafter.propose(wanted) if wanted else None
    return None if proposal is None else DraftsAhead(proposal, num_drafts)


def _reset(names: Sequence[Hashable], drafter: Drafter | None) -> None:
    for name in names:
        if drafter is not None:
            drafter.reset(name)
