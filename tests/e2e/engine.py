"""An engine that does everything to a step at random, and knows what must come out.

Under `sample_match` and greedily a token follows from the tokens before it, the parameters and the
position alone. So each request must give what it gives by itself without drafts, whatever is
drafted, forked, preempted, cancelled or broken around it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import pytest
import torch

from specmla import (
    Bucket,
    CapturedStep,
    ConstraintError,
    DraftProposal,
    DraftRequest,
    NumericsError,
    PoolFullError,
    SamplingParams,
)
from tests.e2e.conftest import VOCAB, make_step
from tests.e2e.grammar import BrokenError, Grammar, random_params

K, MOST = 5, 5
PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 11, 12]]  # prompts share pages
FAULTS = ("masks", "advance", "copy_pages", "move", "plan", "forward", "nan", "cancel", "logits")
TREES = [Bucket(2, 3), Bucket(3, K + 1), Bucket(3, K + 2, trees=True)]  # not all batches fit


class Request(NamedTuple):
    """What a request was added with, and what came out of it."""

    prompt: list[int]
    params: SamplingParams
    bound: bool
    output: list[int]
    logprobs: list[float]


class Engine:
    """Drives one step at random and compares all that it emits."""

    def __init__(self, model, seed: int, temperature: float, *, captured: bool) -> None:
        self.model, self.rng, self.temperature = model, random.Random(seed), temperature
        draw = self.rng.choice
        self.step = make_step(model, draw([1, 2, 3, 4, 8]), draw([12, 40, 90]), rule="sample_match")
        self.names, self.fault, self.seen = 0, "", Counter[str]()
        self.requests: dict[Hashable, Request] = {}
        kinds = [random_params(self.rng, temperature, 0, of) for of in (0.0, 1.0)]
        self.runner = CapturedStep(
            self.step,
            self.forward,
            TREES if captured else [],
            sampling=kinds,
            draft_probs=False,
            constraints=captured,
            eager=True,
        )

    def break_if(self, fault: str) -> None:
        if self.fault == fault:
            self.fault = ""
            self.seen[fault] += 1
            raise BrokenError(fault)

    def forward(self, plan) -> torch.Tensor:
        self.break_if("forward")
        step = self.step
        hidden = self.model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        logits = self.model.logits(hidden[plan.logit_rows])
        if self.fault == "nan":
            self.seen["nan"] += 1
            logits[self.rng.randrange(len(plan.requests) or 1)] = float("nan")
        return logits

    def alone(self, request: Request) -> tuple[list[int], list[float]]:
        """Give what the request emits without drafts and company."""
        tokens, logprobs, step = [], [], make_step(self.model, 16, 12, rule="sample_match")
        bound = Grammar(request.prompt, self.break_if) if request.bound else None
        held, self.fault = self.fault, ""
        step.add("alone", request.prompt, request.params, bound)
        while step.active:
            plan = step.plan()
            hidden = self.model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
            logits = self.model.logits(hidden[plan.logit_rows])
            for r in step.commit(plan, step.verify(plan, logits)):
                tokens += r.new_tokens
                logprobs += r.logprobs or ()
        self.fault = held
        return tokens, logprobs

    def register(self, prompt: list[int], parent: Hashable = None) -> None:
        params = random_params(self.rng, self.temperature, self.names)
        bound = self.rng.random() < 0.3
        name = self.rng.choice([self.names, f"ü{self.names}", ("tuple", self.names)])
        self.names += 1
        held = Grammar(prompt, self.break_if) if bound else None
        if parent is None:
            self.step.add(name, prompt, params, held)
        else:
            self.step.fork(parent, name, params, held)
        request = Request(prompt, params, bound, [], [])
        self.requests[name], self.truth = request, getattr(self, "truth", {})
        self.truth[name] = self.alone(request)

    def act(self) -> None:
        """Do one thing at random, and look at every page."""
        active, luck = self.step.active, self.rng.random()
        if not active or (luck < 0.15 and len(active) < MOST):
            new = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 9))]
            self.register(self.rng.choice(PREFIXES) + new)
        elif luck < 0.25 and len(active) < MOST:
            parent = self.rng.choice(active)
            self.register(list(self.step.tokens(parent)), parent)
            self.seen["forks"] += 1
        elif luck < 0.32:
            self.take_off(self.rng.choice(active), again=self.rng.random() < 0.7)
        else:
            self.fault = self.rng.choice(FAULTS) if self.rng.random() < 0.25 else ""
            self.run()
            self.fault = ""
        self.step.blocks.check_integrity()

    def take_off(self, name: Hashable, *, again: bool) -> None:
        self.step.remove(name)
        if again:
            prompt, params, bound, output, _ = self.requests[name]
            held = Grammar(prompt + output, self.break_if) if bound else None
            self.step.add(name, prompt, params, held, output=output)
            self.seen["preempted"] += 1

    def propose(self) -> DraftProposal | None:
        """Draft what will come, or not: trees in any order, chains, nothing, ids that are none."""
        wanted = {name: self.rng.randint(0, K) for name in self.step.active}
        asked = [r for r in self.step.draft_requests(wanted) if self.rng.random() < 0.9]
        if not asked:
            return None
        self.rng.shuffle(asked)
        drafts = [self.draft(r) for r in asked]
        width = max(len(row) for row, _ in drafts) + self.rng.choice([0, 2])
        rows = [row + [-1] * (width - len(row)) for row, _ in drafts]
        return DraftProposal(
            tuple(r.request_id for r in asked),
            tuple(len(row) for row, _ in drafts),
            torch.tensor(rows, dtype=torch.int64).view(len(rows), width),
            parents=tuple(parents for _, parents in drafts),
        )

    def draft(self, r: DraftRequest) -> tuple[list[int], list[int] | None]:
        rng, request = self.rng, self.requests[r.request_id]
        coming = self.truth[r.request_id][0][len(request.output) :] + [0] * K

        def token(depth: int) -> int:
            wrong = [rng.randrange(VOCAB)] * 8 + [-1, VOCAB + 3, 2**40]
            return coming[depth] if rng.random() < 0.8 else rng.choice(wrong)

        if rng.random() < 0.5:
            return [token(i) for i in range(rng.randint(0, r.num_drafts))], None
        grown = [rng.randrange(-1, node) for node in range(rng.randint(0, r.num_nodes))]
        place = rng.sample(range(len(grown)), len(grown))
        row, parents, depths = [0] * len(grown), [0] * len(grown), []
        for node, parent in enumerate(grown):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            row[place[node]] = token(depths[node])
            parents[place[node]] = -1 if parent < 0 else place[parent]
        return row, parents

    def snapshot(self) -> dict[Hashable, list[int]]:
        return {name: list(self.step.tokens(name)) for name in self.step.active}

    def run(self) -> None:
        """Run a step of some requests; what breaks on the way changes nothing."""
        names = [n for n in self.step.active if self.rng.random() < 0.85] or self.step.active[:1]
        before, step = self.snapshot(), self.step
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (step.cache, "copy_pages"),
                (step.cache, "move"),
                (step.builder.backend, "plan"),
            ):
                patch.setattr(owner, name, self.breaking(getattr(owner, name), name))
            try:
                self.step_of(list(names))
                return
            except PoolFullError:
                self.take_off(self.rng.choice(step.active), again=len(step.active) > 1)
                self.seen["pool full"] += 1
                return
            except (BrokenError, NumericsError, ConstraintError) as error:
                assert self.snapshot() == before
                told = error
        if isinstance(told, ConstraintError):  # its state and those of `told` are not the steps'
            for name in (told.request_id, *told.told):
                self.take_off(name, again=True)

    def breaking(self, real, name: str):
        def call(*given, **options):
            self.break_if(name)
            return real(*given, **options)

        return call

    def step_of(self, names: list[Hashable]) -> None:
        plan = self.runner.plan(self.propose(), names)
        try:
            self.break_if("cancel")
            if self.fault == "logits":
                self.refuse(plan)
            verdict = self.runner.verify(plan)
            results = self.step.commit(plan, verdict)
        except BrokenError:
            self.step.cancel(plan)
            raise
        for r in results:
            self.account(r)

    def refuse(self, plan) -> None:
        """Offer logits of other shapes and dtypes."""
        shape = (len(plan.logit_rows), VOCAB)
        for bad in (torch.zeros(shape[0] + 1, VOCAB), torch.zeros(shape, dtype=torch.int64)):
            with pytest.raises(ValueError, match="logits has"):
                self.step.verify(plan, bad)
        self.seen["logits"] += 1

    def account(self, r) -> None:
        """Compare what a request has emitted so far."""
        request, (tokens, logprobs) = self.requests[r.request_id], self.truth[r.request_id]
        request.output.extend(r.new_tokens)
        request.logprobs.extend(r.logprobs or ())
        self.seen["accepted"] += r.num_accepted
        self.seen["paths"] += r.path is not None and list(r.path) != sorted(r.path)
        assert request.output == tokens[: len(request.output)], r
        torch.testing.assert_close(request.logprobs, logprobs[: len(request.logprobs)])
        if r.finish_reason:
            self.seen["finished"] += 1
            assert request.output == tokens

    def end(self) -> None:
        self.step.drop(self.step.active)
        self.step.blocks.check_integrity()
        assert self.step.blocks.num_free == self.step.blocks.num_pages
