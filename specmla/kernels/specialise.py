"""What a kernel's machine code depends on, as a key that is cheap to compute.

Triton compiles a kernel anew for other types, for integers that are 1 (they become constants) and
for integers and addresses that 16 divides, except where the kernel says otherwise. Two calls whose
keys are equal here run the same machine code there; the tests compare with Triton's own answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from specmla.kernels.tensor_box import BoxedTensor

ALIGNMENT = 16
KNOWN_TYPES = frozenset({Tensor, Parameter, BoxedTensor, int, float, NoneType})
"""Other classes of tensors may have an address that means nothing; a bool is of another type."""

INT_KEYS = 4096
"""Tuples of strides and counts whose keys are remembered."""


class ParameterRule(NamedTuple):
    """How a parameter takes part: not at all, by its value 1, by alignment too."""

    specialise: bool
    aligned: bool


def int_key(value: int, rule: ParameterRule) -> Hashable:
    """Name the form of an integer: the constant 1, or its width and whether 16 divides it."""
    if rule.specialise and value == 1:
        return "1"
    wide = "i32" if -(2**31) <= value < 2**31 else "i64" if -(2**63) <= value < 2**63 else "u64"
    return wide, rule.specialise and rule.aligned and value % ALIGNMENT == 0


class ArgumentPattern:
    """Reads the arguments of calls that have the same Python types at the same places.

    Args:
        types: of the arguments.
        rules: of their parameters.
    """

    def __init__(self, types: Sequence[type], rules: Sequence[ParameterRule]) -> None:
        at = list(enumerate(types))
        self.boxes = [i for i, kind in at if kind is BoxedTensor]
        self._tensors = [i for i, kind in at if kind in (Tensor, Parameter)]
        # Of a parameter without alignment nothing is left of the address.
        self._masks = [
            ALIGNMENT - 1 if rules[i].specialise and rules[i].aligned else 0 for i in self._tensors
        ]
        self._ints = [i for i, kind in at if kind is int]
        self._int_keys = _int_keys([rules[i] for i in self._ints])

    def read(self, args: Sequence[Any]) -> tuple[Hashable, list[Any]]:
        """Give the key of a call, and its arguments with addresses in place of tensors."""
        tensors = [args[i] for i in self._tensors]
        addresses = [t.data_ptr() for t in tensors]
        flat = list(args)
        for i, address in zip(self._tensors, addresses, strict=True):
            flat[i] = address
        key = [t.dtype for t in tensors]
        # A tensor of the host would pass as an address: such a call must be another one.
        key += [t.is_cuda for t in tensors]
        key += [not a & mask for a, mask in zip(addresses, self._masks, strict=True)]
        for i in self.boxes:
            tensor, box = args[i]
            key += tensor.dtype, tensor.is_cuda, box
        return (*key, self._int_keys(tuple([args[i] for i in self._ints]))), flat


def _int_keys(rules: Sequence[ParameterRule]) -> Callable[[tuple[int, ...]], Hashable]:
    @lru_cache(maxsize=INT_KEYS)
    def keys(values: tuple[int, ...]) -> Hashable:
        return tuple(map(int_key, values, rules))

    return keys


class KernelSignature:
    """The parameters of a jitted function: first those of the run, then constexprs.

    Args:
        kernel: a `triton.JITFunction`.

    Attributes:
        rules: of the parameters that are no constexprs.
        names: of those parameters.
        constexprs: names of the others.
        problems: why its calls can't be told apart here.
    """

    def __init__(self, kernel: Any) -> None:
        params = kernel.params
        live = [p for p in params if not p.is_constexpr]
        self.rules = [
            ParameterRule(not p.do_not_specialize, not p.do_not_specialize_on_alignment)
            for p in live
        ]
        self.names = frozenset(p.name for p in live)
        self.constexprs = tuple(p.name for p in params if p.is_constexpr)
        self.problems = []
        if params[: len(live)] != live:
            self.problems.append("a constexpr stands before a parameter of the run")
        if typed := [p.name for p in live if p.annotation_type or p.is_const]:
            self.problems.append(f"{typed} have types of their own")

    def pattern(self, types: tuple[type, ...]) -> ArgumentPattern | None:
        """Give the reader of calls with arguments of these types; None if it is not known."""
        if self.problems or not KNOWN_TYPES.issuperset(types) or len(types) != len(self.rules):
            return None
        return ArgumentPattern(types, self.rules)

    def names_constexprs(self, named: Mapping[str, Any]) -> bool:
        """Tell whether a call names every constexpr, and no parameter of the run."""
        return named.keys() >= set(self.constexprs) and not self.names & named.keys()
