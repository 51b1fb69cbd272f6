"""Acceptance rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specmla.errors import require
from specmla.verify.rules.block import block
from specmla.verify.rules.lossy_relaxed import LossyRelaxed
from specmla.verify.rules.lossy_typical import LossyTypical
from specmla.verify.rules.sample_match import sample_match
from specmla.verify.rules.terms import Rule
from specmla.verify.rules.token_level import token_level

LOSSLESS: Mapping[str, Rule] = MappingProxyType(
    {"token_level": token_level, "block": block, "sample_match": sample_match}
)
"""Rules whose output has exactly the target's distribution. At temperature 0 each is greedy."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {**LOSSLESS, "lossy_typical": LossyTypical(), "lossy_relaxed": LossyRelaxed()}
)
"""All rules; whatever is not lossless says so by its name."""


def rule_problems(rule: str | Rule) -> list[str]:
    """List why `rule` is no rule."""
    known = rule in RULES if isinstance(rule, str) else callable(rule)
    return [] if known else [f"rule is {rule!r}, accepted are {sorted(RULES)} and callable rules"]


def find_rule(rule: str | Rule) -> Rule:
    """Give the rule of a name, or the rule itself (your own, or one with other parameters).

    Raises:
        ArgumentError: an unknown name, or nothing that can be called.
    """
    require(rule_problems(rule), "find_rule")
    return RULES[rule] if isinstance(rule, str) else rule
