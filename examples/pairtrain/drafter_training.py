"""Training of several drafters side by side: one target pass and the same batches for all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pairtrain.curves import Curves
from pairtrain.draft_loss import DraftLoss
from pairtrain.drafter_options import DrafterOptions
from pairtrain.frozen_target import FrozenTarget, TargetRows
from pairtrain.monitor import Monitor, say
from pairtrain.optimiser import Optimiser
from pairtrain.pool import SamplePool
from pairtrain.sampler import LatentSampler
from pairtrain.schedule import Schedule
from pairtrain.windows import TokenWindows

LOSS, LENGTH = "KL to the target", "expected tokens a step"
COMPILING_STEPS = 3  # before the clock starts
LOG_EVERY = 10
VALIDATIONS = 12  # spread over the run
POOL_SHARE = 0.5  # of a batch, from the target's own text
REFILLS = 4
VARIATION_FROM, VARIATION_TO, VARIATION_SHARE = 0.3, 0.8, 0.9  # ramp of the TV part of the loss
SAVE_EVERY = 45.0  # seconds between checkpoints


class Trainee(Protocol):
    """A drafter under training."""

    name: str
    layers: tuple[int, ...]
    num_drafts: int
    module: nn.Module

    def loss(self, rows: TargetRows, generator: torch.Generator, share: Tensor) -> DraftLoss:
        """Give the loss on a batch of the target's rows."""
        ...

    def save(self, folder: Path) -> None:
        """Write the checkpoint that serves."""
        ...


class DrafterTraining:
    """One run; checkpoints are written as it goes, so that one cut short is not lost."""

    def __init__(
        self,
        target: FrozenTarget,
        trainees: Sequence[Trainee],
        train: TokenWindows,
        held_out: TokenWindows,
        options: DrafterOptions,
        curves: Curves,
    ) -> None:
        self._target, self._trainees, self._train = target, trainees, train
        self._options, self._curves = options, curves
        self._layers = sorted({i for trainee in trainees for i in trainee.layers})
        self._generator = torch.Generator(options.device).manual_seed(options.seed)
        self._pool = SamplePool(options.pool, options.window + 2) if options.pool else None
        self._validation = held_out.spread(min(options.batch, 128))
        self._tokens, self._saved = 0, time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train until the schedule ends; return figures for the report."""
        options, started = self._options, time.monotonic()
        schedule = Schedule(options.minutes, options.steps)
        optimisers = {t.name: Optimiser(t.module, options.rate) for t in self._trainees}
        step, validations, refills = 0, 0, 0
        with Monitor("drafters") as monitor:
            while (progress := schedule.progress(step)) < 1:
                if self._pool and progress * REFILLS >= refills:
                    refills += 1
                    self._refill()
                if progress * VALIDATIONS >= validations:
                    validations += 1
                    self._validate()
                losses = self._train_step(optimisers, progress)
                step += 1
                self._tokens += options.batch * options.window
                if step == COMPILING_STEPS:
                    _values(losses)
                    schedule.start()
                if step % LOG_EVERY == 0:
                    self._log(_values(losses), progress, monitor)
        held_out = self._validate()
        self._save()
        return {
            "steps": step,
            "tokens_seen": self._tokens,
            "seconds": round(time.monotonic() - started, 1),
            "held_out": held_out,
            "pool_refills": refills,
        }

    def _refill(self) -> None:
        started, target = time.monotonic(), self._target
        dtype = torch.bfloat16 if self._options.device.type == "cuda" else torch.float32
        sampler = LatentSampler(target.model.state_dict(), target.config, dtype)
        assert self._pool is not None
        self._pool.refill(sampler, self._train, self._generator)
        say(f"drafters: sampled {self._options.pool} windows, {time.monotonic() - started:.1f} s")

    def _train_step(
        self, optimisers: Mapping[str, Optimiser], progress: float
    ) -> dict[str, Tensor]:
        ramp = (progress - VARIATION_FROM) / (VARIATION_TO - VARIATION_FROM)
        share = VARIATION_SHARE * min(max(ramp, 0.0), 1.0)
        rows = self._target.run(self._draw(), self._layers)
        found = {}
        for trainee in self._trainees:
            with self._target.precision():
                loss = trainee.loss(rows, self._generator, self._scalar(share))
            optimisers[trainee.name].step(loss.loss, progress)
            found[trainee.name] = loss.divergence
        return found

    def _draw(self) -> Tensor:
        """Windows of the corpus, and of the target's own text if there is a pool."""
        batch = self._options.batch
        own = round(batch * POOL_SHARE) if self._pool else 0
        tokens = self._train.draw(batch - own, self._generator)
        if not self._pool:
            return tokens
        pooled = self._pool.draw(own, self._generator)
        return torch.cat((tokens, pooled[:, : tokens.shape[1]]))

    @torch.no_grad()
    def _validate(self) -> dict[str, dict[str, Any]]:
        """Measure every drafter on the same held-out windows and anchors."""
        figures = {}
        rows = self._target.run(self._validation, self._layers)
        for trainee in self._trainees:
            generator = torch.Generator(self._options.device).manual_seed(0)
            with self._target.precision():
                loss = trainee.loss(rows, generator, self._scalar(0.0))
            length = 1 + float(loss.acceptance.cumprod(0).sum())
            self._curves.add(LOSS, f"{trainee.name} held out", self._tokens, float(loss.divergence))
            self._curves.add(LENGTH, trainee.name, self._tokens, length)
            figures[trainee.name] = {
                "divergence": round(float(loss.divergence), 4),
                "acceptance_by_position": [round(x, 4) for x in loss.acceptance.tolist()],
                "match_by_position": [round(x, 4) for x in loss.match.tolist()],
                "expected_tokens_per_step": round(length, 3),
            }
        lengths = ", ".join(f"{n} {f['expected_tokens_per_step']}" for n, f in figures.items())
        say(f"drafters: held out, expected tokens a step: {lengths}")
        return figures

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, device=self._options.device)

    def _log(self, losses: Mapping[str, float], progress: float, monitor: Monitor) -> None:
        for name, loss in losses.items():
            self._curves.add(LOSS, f"{name} training", self._tokens, loss)
        figures = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        monitor.update(progress, f"{self._tokens / 1e6:.1f} M tokens, KL {figures}")
        if time.monotonic() - self._saved > SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        for trainee in self._trainees:
            trainee.save(self._options.out / trainee.name)


def _values(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.items()}
