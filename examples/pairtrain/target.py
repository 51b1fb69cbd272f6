"""Training of the target: next-token prediction on windows of the corpus."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from pairtrain.curves import Curves
from pairtrain.losses import next_token_loss
from pairtrain.monitor import Monitor
from pairtrain.network import Network
from pairtrain.optimiser import Optimiser
from pairtrain.options import Options
from pairtrain.schedule import Schedule
from pairtrain.windows import TokenWindows

PANEL = "target"
COMPILING_STEPS = 3  # before the clock starts
LOG_EVERY = 10
VALIDATIONS = 10  # spread over the run
VALIDATION_WINDOWS = 256


class TargetTraining:
    """One run over `train`; the held-out loss is measured on windows that never change."""

    def __init__(
        self,
        network: Network,
        train: TokenWindows,
        held_out: TokenWindows,
        options: Options,
        curves: Curves,
    ) -> None:
        self._network, self._train, self._options, self._curves = network, train, options, curves
        self._loss = torch.compile(next_token_loss, dynamic=False, disable=not options.compile)
        self._validation = held_out.spread(min(options.batch, VALIDATION_WINDOWS))
        self._tokens = 0

    def run(self) -> dict[str, Any]:
        """Train until the schedule ends; return figures for the report."""
        options, started = self._options, time.monotonic()
        schedule = Schedule(options.target_minutes, options.steps)
        optimiser = Optimiser(self._network.model, options.target_rate)
        generator = torch.Generator(options.device).manual_seed(options.seed)
        step, validations = 0, 0
        with Monitor("target") as monitor:
            while (progress := schedule.progress(step)) < 1:
                if progress * VALIDATIONS >= validations:
                    validations += 1
                    self._validate()
                loss = self._loss_of(self._train.draw(options.batch, generator))
                optimiser.step(loss, progress)
                step += 1
                self._tokens += options.batch * options.window
                if step == COMPILING_STEPS:
                    loss.item()
                    schedule.start()
                if step % LOG_EVERY == 0:
                    self._log(loss.item(), progress, monitor)
        self._validate()
        return {
            "steps": step,
            "tokens_seen": self._tokens,
            "train_loss": self._train_loss(),
            "held_out_loss": round(self._curves.last(PANEL, "held out"), 4),
            "seconds": round(time.monotonic() - started, 1),
        }

    def _loss_of(self, windows: Tensor) -> Tensor:
        with self._network.precision():
            hidden = self._network.hidden(windows[:, :-1])
            loss: Tensor = self._loss(hidden, self._network.head, windows[:, 1:])
            return loss

    @torch.no_grad()
    def _validate(self) -> None:
        loss = self._loss_of(self._validation)
        self._curves.add(PANEL, "held out", self._tokens, loss.item())

    def _log(self, loss: float, progress: float, monitor: Monitor) -> None:
        self._curves.add(PANEL, "training", self._tokens, loss)
        held_out = self._curves.last(PANEL, "held out")
        monitor.update(
            progress,
            f"{self._tokens / 1e6:.1f} M tokens, loss {loss:.3f}, held out {held_out:.3f}",
        )

    def _train_loss(self) -> float | None:
        """Mean of the last logged losses, None for a run too short to log any."""
        logged = self._curves.panels[PANEL].get("training", [])[-10:]
        return round(sum(value for _, value in logged) / len(logged), 4) if logged else None
