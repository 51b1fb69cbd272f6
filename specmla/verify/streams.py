"""Counter-based random numbers for drafting, acceptance and correction.

A number is a pure function of (seed, anchor position, row, node, stream): no generator holds
state, so a request's numbers do not depend on its batch mates, on how often it was rolled back or
on the device (integer arithmetic only, equal on CPU and CUDA).

The anchor position names the block, row and node the place in it. The position of the token alone
would be a wrong key: a position rejected in one block is drawn anew in the next, and would meet
the noise that has already decided about it. For the same reason a draft, its acceptance and the
correction never share a number: each has a stream of its own. The one exception is the stream of
tokens that the target draws by itself at every place (sample-match): each of them is final where it
is used at all, so that it may, and does, follow from seed and position alone.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied three
times: to the seed, to the anchor position, and to (stream, node, row) packed into one word. For
fixed outer fields each step is a SplitMix64 sequence over the inner field.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import require

MAX_ROWS = 2**31
MAX_NODES = 2**24


class Stream(enum.IntEnum):
    """What a random number decides; the streams never meet."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2
    TARGET = 3


class StepUniforms(NamedTuple):
    """The numbers one verify step needs.

    Attributes:
        accept: [B, K] float64 in (0, 1).
        correction: [B] float64 in (0, 1); [B, K+1] where the target draws a token for each row.
    """

    accept: Tensor
    correction: Tensor


def uniforms(
    seed: Tensor, position: Tensor, row: Tensor, stream: Stream, node: int | Tensor = 0
) -> Tensor:
    """Draw the uniforms of one stream.

    Args:
        seed: [B] int64.
        position: [B] int64, the index of the anchor in its sequence.
        row: [K] or [B, K] int64 in 0 .. 2**31 - 1, the row of the block, the anchor's being 0.
        stream: what the numbers are for.
        node: in 0 .. 2**24 - 1, the child tried at that row; 0 in a chain. A tensor (int64, of the
            shape of row) gives one for each number; its range is not checked.

    Returns:
        [B, K] float64 strictly between 0 and 1, odd multiples of 2**-53.

    Raises:
        ArgumentError: shapes that do not fit each other, or a node outside its range.
    """
    _check(seed, position, row, node)
    word = row + (node << 31) + _stream_word(stream, 0)
    return _to_unit(_hash(_block_key(seed, position)[:, None], word))


def step_uniforms(seed: Tensor, position: Tensor, num_drafts: int) -> StepUniforms:
    """Draw what a chain step needs in one go: `accept` for rows 0 .. K-1, `correction` at row 0.

    Equal, bit for bit, to `uniforms` with `Stream.ACCEPT` and with `Stream.CORRECTION`.

    Args:
        seed: [B] int64.
        position: [B] int64, the index of the anchor in its sequence.
        num_drafts: K, zero or more.
    """
    words = torch.arange(num_drafts + 1, device=seed.device) + _stream_word(Stream.ACCEPT, 0)
    words[num_drafts:] = _stream_word(Stream.CORRECTION, 0)
    _check(seed, position, words, 0)
    drawn = _to_unit(_hash(_block_key(seed, position)[:, None], words))
    return StepUniforms(drawn[:, :num_drafts], drawn[:, num_drafts])


def target_uniforms(seed: Tensor, position: Tensor, num_rows: int) -> Tensor:
    """Draw the numbers [B, num_rows] of tokens that the target draws by itself.

    Column j equals `uniforms(seed, position + j, row 0, Stream.TARGET)`: it is a function of seed
    and place, wherever a block starts.

    Args:
        seed: [B] int64.
        position: [B] int64, the index of the anchor in its sequence.
        num_rows: places, the one after the anchor first.
    """
    places = position[:, None] + torch.arange(num_rows, device=seed.device)
    word = torch.full((1,), _stream_word(Stream.TARGET, 0), device=seed.device)
    _check(seed, position, word, 0)
    key = _hash(_mix(seed + _signed(_GAMMA))[:, None], places)
    return _to_unit(_hash(key, word))


def _stream_word(stream: Stream, node: int) -> int:
    """Pack stream and node above the 31 bits of the row, without overlap."""
    return (int(stream) << 56) | (node << 31)


def _block_key(seed: Tensor, position: Tensor) -> Tensor:
    return _hash(_mix(seed + _signed(_GAMMA)), position)


def _hash(key: Tensor, field: Tensor) -> Tensor:
    """Give the element `field` of the SplitMix64 sequence that starts at `key`."""
    return _mix(key + (field + 1) * _signed(_GAMMA))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift logically: torch's shift of int64 copies the sign, the mask removes the copies."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_unit(z: Tensor) -> Tensor:
    """Use 52 bits, so that the half step that keeps 0 and 1 out is exact in float64."""
    return (_shift_right(z, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(word: int) -> int:
    """Give the int64 that has the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


_GAMMA = 0x9E3779B97F4A7C15


def _check(seed: Tensor, position: Tensor, row: Tensor, node: int | Tensor) -> None:
    b, found = tuple(seed.shape), []
    for name, tensor in (("seed", seed), ("position", position), ("row", row)):
        if tensor.dtype != torch.int64:
            found.append(f"{name} has dtype {tensor.dtype}, accepted is torch.int64")
    if seed.dim() != 1 or position.shape != seed.shape:
        found.append(
            f"seed has shape {b}, position {tuple(position.shape)}; accepted is [B] for both"
        )
    if row.dim() not in (1, 2) or (row.dim() == 2 and row.shape[:1] != seed.shape):
        found.append(f"row has shape {tuple(row.shape)}, accepted is [K] or [B, K]")
    if isinstance(node, Tensor):
        if node.dtype != torch.int64 or node.shape != row.shape:
            found.append(f"node is {node.dtype} {tuple(node.shape)}, accepted is int64 like row")
    elif not 0 <= node < MAX_NODES:
        found.append(f"node={node}, accepted is 0 .. {MAX_NODES - 1}")
    require(found, "uniforms")
