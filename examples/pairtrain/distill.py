"""Distillation of drafts from a trained target, several sizes side by side on the same batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pairtrain.curves import Curves
from pairtrain.losses import distillation_loss
from pairtrain.monitor import Monitor, say
from pairtrain.network import Network
from pairtrain.optimiser import Optimiser
from pairtrain.options import Options
from pairtrain.pool import SamplePool
from pairtrain.sampler import LatentSampler
from pairtrain.schedule import Schedule
from pairtrain.target import COMPILING_STEPS, LOG_EVERY, VALIDATION_WINDOWS, VALIDATIONS
from pairtrain.windows import TokenWindows

PANEL = "drafts: KL to the target"
POOL_SHARE = 0.5  # of a batch, from the target's own text
REFILLS = 3
VARIATION_FROM, VARIATION_TO, VARIATION_SHARE = 0.4, 0.8, 0.8  # ramp of the TV part of the loss


class Distillation:
    """Trains `drafts` (by name) to the distribution of `target`, which stays as it is."""

    def __init__(
        self,
        target: Network,
        drafts: Mapping[str, Network],
        train: TokenWindows,
        held_out: TokenWindows,
        options: Options,
        curves: Curves,
    ) -> None:
        self._target, self._drafts, self._train = target, drafts, train
        self._options, self._curves = options, curves
        self._loss = torch.compile(distillation_loss, dynamic=False, disable=not options.compile)
        self._generator = torch.Generator(options.device).manual_seed(options.seed + 1)
        self._pool = SamplePool(options.pool, options.window)
        rows = min(options.batch, VALIDATION_WINDOWS)
        self._validation = held_out.spread(rows)[:, : options.window]
        self._tokens = 0

    def run(self) -> dict[str, Any]:
        """Train until the schedule ends; return figures for the report, by draft."""
        started = time.monotonic()
        schedule = Schedule(self._options.draft_minutes, self._options.steps)
        optimisers = {
            name: Optimiser(draft.model, self._options.draft_rate)
            for name, draft in self._drafts.items()
        }
        step, validations, refills = 0, 0, 0
        with Monitor("drafts") as monitor:
            while (progress := schedule.progress(step)) < 1:
                if progress * REFILLS >= refills:
                    refills += 1
                    self._refill()
                if progress * VALIDATIONS >= validations:
                    validations += 1
                    self._validate()
                losses = self._train_step(optimisers, progress)
                step += 1
                self._tokens += self._options.batch * self._options.window
                if step == COMPILING_STEPS:
                    _values(losses)
                    schedule.start()
                if step % LOG_EVERY == 0:
                    self._log(_values(losses), progress, monitor)
        held_out = self._validate()
        return {
            "steps": step,
            "tokens_seen": self._tokens,
            "seconds": round(time.monotonic() - started, 1),
            "held_out": held_out,
            "pool_windows": self._options.pool,
            "pool_refills": refills,
        }

    def _refill(self) -> None:
        started = time.monotonic()
        target = self._target
        dtype = torch.bfloat16 if self._options.device.type == "cuda" else torch.float32
        sampler = LatentSampler(target.model.state_dict(), target.config, dtype)
        self._pool.refill(sampler, self._train, self._generator)
        say(f"drafts: sampled {self._options.pool} windows, {time.monotonic() - started:.1f} s")

    def _train_step(
        self, optimisers: Mapping[str, Optimiser], progress: float
    ) -> dict[str, Tensor]:
        batch = self._options.batch
        from_pool = round(batch * POOL_SHARE)
        corpus = self._train.draw(batch - from_pool, self._generator)[:, : self._options.window]
        tokens = torch.cat((corpus, self._pool.draw(from_pool, self._generator)))
        target_logits = self._target_logits(tokens)
        ramp = (progress - VARIATION_FROM) / (VARIATION_TO - VARIATION_FROM)
        share = torch.full(
            (), VARIATION_SHARE * min(max(ramp, 0.0), 1.0), device=self._options.device
        )
        divergences = {}
        for name, draft in self._drafts.items():
            with draft.precision():
                hidden = draft.hidden(tokens)
                loss, divergence, _ = self._loss(hidden, draft.head, target_logits, share)
            optimisers[name].step(loss, progress)
            divergences[name] = divergence
        return divergences

    @torch.no_grad()
    def _target_logits(self, tokens: Tensor) -> Tensor:
        with self._target.precision():
            return F.linear(self._target.hidden(tokens), self._target.head)

    @torch.no_grad()
    def _validate(self) -> dict[str, dict[str, float]]:
        """Measure KL and 1 - TV, the expected acceptance of a draft, on held-out windows."""
        target_logits = self._target_logits(self._validation)
        zero = torch.zeros((), device=self._options.device)
        figures = {}
        for name, draft in self._drafts.items():
            with draft.precision():
                hidden = draft.hidden(self._validation)
                _, divergence, variation = self._loss(hidden, draft.head, target_logits, zero)
            self._curves.add(PANEL, f"{name} held out", self._tokens, divergence.item())
            figures[name] = {
                "divergence": round(divergence.item(), 4),
                "expected_acceptance": round(1 - variation.item(), 4),
            }
        return figures

    def _log(self, losses: Mapping[str, float], progress: float, monitor: Monitor) -> None:
        for name, loss in losses.items():
            self._curves.add(PANEL, f"{name} training", self._tokens, loss)
        figures = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        monitor.update(progress, f"{self._tokens / 1e6:.1f} M tokens, KL {figures}")


def _values(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.items()}
