"""A drafter at work beside a step, under random histories, and the truth about its rows."""

from __future__ import annotations

import random
from collections import Counter

import torch

from drafters import (
    DDTreeDrafter,
)
from specmla import PoolFullError, SamplingParams, VerifyStep
from specmla.models.states import StateCollector
from specmla.testing.drafter_trace import take_part
from specmla.verify.hidden import committed_rows
from specmla.verify.proposal import DraftRequest, HiddenRows, RequestResult
from tests.drafters.kinds import maker, pool_of, rows_of
from tests.drafters.networks import VOCAB
from tests.e2e.conftest import make_step

PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 11, 12]]  # prompts share pages
STOPS = (58, 59)  # which the heads of a reduced vocabulary know
LIMIT = 26


class World:
    """A drafter at work beside a step, and the truth about its rows."""

    def __init__(self, target, kind: str, seed: int, page_size: int, pages: tuple[int, int]):
        self.target, self.rng, self.names = target, random.Random(seed), 0
        self.make = maker(target, kind, pages[1])
        self.fresh_of = maker(target, kind, 40)
        self.step = make_step(target, page_size, pages[0], num_draft_layers=1)
        self.step.cache.layer(target.config.num_layers).fill_(float("nan"))
        self.drafter = self.make(self.step)
        self.poison(self.drafter, self.step)
        self.seen: Counter[str] = Counter()
        self.left: dict[str, list[int]] = {}  # preempted requests, to be taken up again

    def poison(self, drafter, step: VerifyStep) -> None:
        cache, _, layers = pool_of(drafter, step)
        for layer in layers:
            cache.layer(layer).fill_(float("nan"))

    def add(self) -> None:
        draw = self.rng
        new = draw.choice(PREFIXES) + [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 5))]
        params = SamplingParams(max_tokens=draw.choice([3, LIMIT]), stop_token_ids=STOPS)
        name, prompt = f"r{self.names}", new
        if self.left and draw.random() < 0.7:
            name, prompt = self.left.popitem()
        self.names += 1
        self.seen["hits"] += self.step.add(name, prompt, params) > 0

    def cached(self) -> set[int]:
        """Name the pages that a later prompt may find."""
        pool = self.step.blocks._pool
        return {page for page in range(pool.num_pages) if page in pool.index}

    def fork(self) -> None:
        name = f"r{self.names}"
        self.names += 1
        params = SamplingParams(max_tokens=LIMIT, stop_token_ids=STOPS)
        self.step.fork(self.rng.choice(self.step.active), name, params)
        self.seen["forks"] += 1

    def preempt(self) -> None:
        name = self.rng.choice(self.step.active)
        self.left[name] = list(self.step.tokens(name))
        self.step.drop([name])
        self.drafter.reset(name)
        self.seen["preempted"] += 1

    def propose(self):
        """Ask for some requests' drafts, each drawn at temperature 1 by the seed of its length."""
        wanted = {name: self.rng.choice([0, 1, 3, 8]) for name in self.step.active}
        asked = [
            r._replace(tokens=list(r.tokens), sampling=SamplingParams(1.0, seed=len(r.tokens)))
            for r in self.step.draft_requests(wanted)
            if r.num_drafts
        ]
        if not asked:
            return None
        try:
            proposal = self.drafter.propose(asked)
        except PoolFullError:
            self.seen["draft pool full"] += 1
            return None
        for r in asked:
            self.check(r, take_part(proposal, r.request_id, self.drafter.vocab_size))
        return proposal

    def check(self, r: DraftRequest, got) -> None:
        """Compare a proposal, and the rows behind it, with those of a fresh drafter."""
        log = self.log(self.drafter)
        if log is not None and not log.is_ready(r.request_id, r.tokens):
            assert len(got.tokens) == 0
            return
        first = 0 if log is None else log[r.request_id].first
        drafter, step, want = self.fresh(r, first)
        torch.testing.assert_close(got.tokens, want.tokens)
        if got.probs is not None and got.probs.numel():
            torch.testing.assert_close(got.probs, want.probs, atol=1e-4, rtol=1e-3)
        if not len(got.tokens):
            return
        count = len(r.tokens) if log is None else len(r.tokens) - 1 - first
        held = rows_of(self.drafter, self.step, r.request_id, count, first)
        truth = rows_of(drafter, step, r.request_id, count, first)
        # The halves of a prompt behind a prefix are merged by float32 LSEs.
        torch.testing.assert_close(held, truth, atol=1e-4, rtol=1e-3)
        self.seen["rows"] += count
        self.seen["behind a prefix"] += first > 0

    def log(self, drafter):
        inner = drafter.blocks if isinstance(drafter, DDTreeDrafter) else drafter
        return getattr(inner, "_log", None)

    @torch.no_grad()
    def fresh(self, r: DraftRequest, first: int):
        """A drafter that hears of a request's tokens, from `first` on, at once."""
        step = make_step(self.target, 16, 8, num_draft_layers=1, prefix_caching=False)
        step.cache.layer(self.target.config.num_layers).fill_(float("nan"))
        drafter = self.fresh_of(step)
        step.add(r.request_id, r.tokens[:-1] or r.tokens, SamplingParams(max_tokens=LIMIT))
        if len(r.tokens) > 1:
            plan = step.plan()
            self.run_target(step, plan, drafter, first, r.tokens[-1])
        return drafter, step, take_part(drafter.propose([r]), r.request_id, drafter.vocab_size)

    def run_target(self, step, plan, drafter, first: int, anchor: int) -> None:
        layers = getattr(drafter, "hidden_layers", ())
        states = StateCollector(layers, self.target.config.num_layers) if layers else None
        self.target(plan.token_ids, plan.metadata, step.cache, step.builder.backend, states)
        logits = torch.zeros(len(plan.logit_rows), VOCAB, dtype=torch.float64)
        results = step.commit(plan, step.verify(plan, logits))
        told = [x._replace(new_tokens=(anchor,)) for x in results]
        joined = None if states is None else states.joined()[first:]
        known = None if joined is None else HiddenRows(joined, (first,), (len(joined),))
        drafter.observe(told, known)

    def page(self, page: int) -> torch.Tensor:
        """The bits of a page in the target's layers; the module's are its owner's alone."""
        layers = range(self.target.config.num_layers)
        return torch.stack([self.step.cache.layer(i)[page] for i in layers]).view(torch.int64)

    def shared_pages(self) -> dict[int, torch.Tensor]:
        pool = self.step.blocks._pool
        pages = [p for p in range(pool.num_pages) if pool.refs[p] > 1 or p in pool.index]
        return {page: self.page(page) for page in pages}

    @torch.no_grad()
    def run(self) -> None:
        """Draft, verify with chosen acceptances, and commit (or not)."""
        if not self.step.active:
            return
        before, cached = self.shared_pages(), self.cached()
        proposal = self.propose()
        try:
            plan = self.step.plan(proposal)
        except PoolFullError:
            self.seen["target pool full"] += 1
            self.preempt()
            return
        layers = getattr(self.drafter, "hidden_layers", ())
        states = StateCollector(layers, self.target.config.num_layers) if layers else None
        step = self.step
        self.seen["evicted"] += len(cached - self.cached())
        # What was taken out of the prefix cache is no longer shared; all else is as it was.
        shared = {page: bits for page, bits in before.items() if page in self.shared_pages()}
        self.target(plan.token_ids, plan.metadata, step.cache, step.builder.backend, states)
        if self.rng.random() < 0.12:
            step.cancel(plan)
            self.seen["cancelled"] += 1
        else:
            results = step.commit(plan, step.verify(plan, self.logits(plan)))
            known = None if states is None else committed_rows(plan, results, states.joined())
            self.hear(results, known, heard=proposal is not None or self.rng.random() < 0.9)
        for page, bits in shared.items():
            assert torch.equal(self.page(page), bits), page
        self.seen["shared"] = max(self.seen["shared"], len(shared))

    def hear(self, results: list[RequestResult], known: HiddenRows | None, heard: bool) -> None:
        if heard:
            self.drafter.observe(results, known)
        self.seen["unheard"] += not heard
        for r in results:
            self.seen["paths"] += r.path is not None and list(r.path) != list(range(len(r.path)))
            self.seen["rejected"] += r.num_accepted < r.num_drafts
            self.seen["accepted"] += r.num_accepted > 1
            if r.finish_reason:
                self.seen["cut"] += len(r.new_tokens) <= r.num_accepted
                self.seen[r.finish_reason] += 1
                self.drafter.reset(r.request_id)

    def logits(self, plan) -> torch.Tensor:
        """Let each row favour one of its own children, a stop now and then, or anything."""
        out = torch.zeros(len(plan.logit_rows), VOCAB, dtype=torch.float64)
        for b, request in enumerate(plan.requests):
            k = request.num_drafts
            tree = request.tree.parents if request.tree else tuple(range(k))
            for row in range(k + 1):
                children = [node for node in range(k) if tree[node] == row]
                token = self.rng.choice([*STOPS, *[self.rng.randrange(VOCAB)] * 18])
                if children and self.rng.random() < 0.85:
                    token = int(plan.drafts[b, self.rng.choice(children)])
                out[plan.row_table[b, row], token] = 9.0
        return out

    def act(self, action: str) -> None:
        few = len(self.step.active) < 3
        if action == "add" or not self.step.active:
            self.add() if few else None
        elif action == "fork":
            self.fork() if few else None
        elif action == "preempt":
            self.preempt()
        else:
            self.run()
        self.step.blocks.check_integrity()
        pool_of(self.drafter, self.step)[1].check_integrity()

    def end(self) -> None:
        for name in self.step.active:
            self.step.drop([name])
            self.drafter.reset(name)
        for blocks in (self.step.blocks, pool_of(self.drafter, self.step)[1]):
            blocks.check_integrity()
            assert blocks.num_free == blocks.num_pages
