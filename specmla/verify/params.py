"""What one request asks of the sampler, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specmla.errors import require

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAX_TOP_K = 2**31 - 1
_MAX_COUNT = 2**31 - 1
# Added up over as many tokens as can be counted, and to a model's logits, these stay in float32.
_MAX_SHIFT = 1e24
_MAX_FACTOR = 1e18
LOGPROBS = ("raw", "processed")
"""Whose log-probabilities a request may ask for."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Attributes:
        temperature: 0 is greedy. Held in float32 on the device, so a value that rounds to 0 there
            is greedy as well.
        top_k: the number of ids kept; 0 keeps all.
        top_p: the mass kept, above 0 and at most 1; 1 keeps all.
        seed: names the request's random streams; equal seeds and equal inputs give equal tokens.
            But for `sample_match` drafts are inputs: where the prefix cache leaves one token of a
            prompt, drafts are verified a step earlier than without. None: `VerifyStep.add` draws
            one from torch's default generator, so that requests of equal prompts differ.
        max_tokens: new tokens at most; None sets no limit.
        stop_token_ids: ids that end the request; the id met is the last one emitted.
        min_p: least probability kept, relative to the likeliest id's; 0 keeps all.
        repetition_penalty: logits of ids in the prompt or the output are divided by it where
            positive, multiplied where negative; 1 is off.
        presence_penalty: taken off the logits of ids in the output.
        frequency_penalty: taken off the logits of ids in the output, once for each time.
        min_tokens: new tokens before which no stop token is emitted.
        banned_token_ids: ids that are never emitted.
        logit_bias: pairs of an id and what is added to its logit.
        logprobs: "raw" or "processed": report the log-probability of each emitted token under the
            model's own distribution (temperature 1, nothing applied), or under the one it was drawn
            from. None: report none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    banned_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ArgumentError: lists all fields that cannot be used.
        """
        require(self._shape_problems() + self._processor_problems(), "SamplingParams")

    def _shape_problems(self) -> list[str]:
        found = []
        if not _is_real(self.temperature) or not 0 <= self.temperature <= _FLOAT32_MAX:
            found.append(
                f"temperature={self.temperature!r}, accepted is a finite float32 of 0 (greedy) "
                "or more"
            )
        if not _is_int(self.top_k) or not 0 <= self.top_k <= _MAX_TOP_K:
            found.append(f"top_k={self.top_k!r}, accepted is 0 (off) to {_MAX_TOP_K}")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            found.append(f"top_p={self.top_p!r}, accepted is above 0 and at most 1 (off)")
        if not _is_real(self.min_p) or not 0 <= self.min_p <= 1:
            found.append(f"min_p={self.min_p!r}, accepted is 0 (off) to 1")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            found.append(f"seed={self.seed!r}, accepted is an int in 0 .. 2**63 - 1, or None")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            found.append(f"max_tokens={self.max_tokens!r}, accepted is 1 or more, or None")
        return found + _id_problems("stop_token_ids", self.stop_token_ids)

    def _processor_problems(self) -> list[str]:
        found, rep = [], self.repetition_penalty
        if not _is_real(rep) or not 1 / _MAX_FACTOR <= rep <= _MAX_FACTOR:
            accepted = f"{1 / _MAX_FACTOR:g} to {_MAX_FACTOR:g} (1: off)"
            found.append(f"repetition_penalty={rep!r}, accepted is {accepted}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_real(value) or not abs(value) <= _MAX_SHIFT:
                accepted = f"{-_MAX_SHIFT:g} to {_MAX_SHIFT:g} (0: off)"
                found.append(f"{name}={value!r}, accepted is {accepted}")
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= _MAX_COUNT:
            found.append(f"min_tokens={self.min_tokens!r}, accepted is 0 to {_MAX_COUNT}")
        found += _id_problems("banned_token_ids", self.banned_token_ids)
        bias = self.logit_bias
        if not isinstance(bias, tuple) or not all(map(_is_bias, bias)):
            found.append(f"logit_bias={bias!r}, accepted is a tuple of (id, finite number)")
        else:
            far = {t: total for t, total in _bias_sums(bias).items() if abs(total) > _MAX_SHIFT}
            if far:
                accepted = (
                    f"{-_MAX_SHIFT:g} to {_MAX_SHIFT:g} for each id (to ban: banned_token_ids)"
                )
                found.append(f"logit_bias adds {far}, accepted is {accepted}")
        if self.logprobs is not None and self.logprobs not in LOGPROBS:
            found.append(f"logprobs={self.logprobs!r}, accepted are {LOGPROBS} and None")
        return found

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def summed_bias(self) -> dict[int, float]:
        """What is added to the logit of each id that `logit_bias` names."""
        return _bias_sums(self.logit_bias)

    @property
    def named_ids(self) -> dict[str, tuple[int, ...]]:
        """All ids that the parameters name, by field."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "banned_token_ids": self.banned_token_ids,
            "logit_bias": tuple(token for token, _ in self.logit_bias),
        }

    def seeded(self) -> SamplingParams:
        """Give these parameters with a seed: their own, or a fresh one."""
        if self.seed is not None:
            return self
        return replace(self, seed=int(torch.randint(2**63 - 1, ())))


def _id_problems(name: str, ids: object) -> list[str]:
    if isinstance(ids, tuple) and all(_is_int(t) and t >= 0 for t in ids):
        return []
    return [f"{name}={ids!r}, accepted is a tuple of ids of 0 or more"]


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    token, value = pair
    return _is_int(token) and token >= 0 and _is_real(value) and abs(value) <= _FLOAT32_MAX


def _bias_sums(bias: tuple[tuple[int, float], ...]) -> dict[int, float]:
    sums: dict[int, float] = {}
    for token, value in bias:
        sums[token] = sums.get(token, 0.0) + value
    return sums


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
