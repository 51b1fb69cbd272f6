"""The FlashMLA adapter over a stand-in of the operator's schema and contract."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla import MetadataBuilder, RequestKind, RequestRows
from specmla.backends.base import Requirements
from specmla.backends.flashmla import FlashMLABackend
from specmla.backends.flashmla_plan import FlashMLAPlan
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import get_backend
from specmla.backends.step_size import StepSize
from specmla.buffers import total_bytes
from specmla.errors import ArgumentError, UnsupportedError
from specmla.kernels.launch import Device
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.testing import assert_matches_oracle, check_backend, make_case

SPACE = "specmla_fake_flashmla_backend"
SCHEMA = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, "
    "Tensor block_table, float softmax_scale, bool is_causal, "
    "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
)


def dense_decode_fwd(
    q: Tensor,
    cache: Tensor,
    rank: int,
    seq_lens: Tensor,
    table: Tensor,
    scale: float,
    causal: bool,
    schedule: Tensor | None,
    splits: Tensor | None,
) -> tuple[Tensor, ...]:
    """Attend as the operator does; rows without keys get +inf, and NaN to see it replaced."""
    assert q.is_contiguous()
    assert q.shape[3] == 576
    assert cache.shape[1:] == (64, 1, 576)
    assert q.dtype == cache.dtype
    assert seq_lens.dtype == table.dtype == torch.int32
    assert int(table.min()) >= 0
    assert int(table.max()) < cache.shape[0]
    if schedule is None or splits is None:
        schedule, splits = seq_lens.clone(), seq_lens.new_zeros(len(seq_lens) + 1)
    assert torch.equal(schedule, seq_lens), "the schedule of another step"
    batch, length, heads, _ = q.shape
    out = q.new_full((batch, length, heads, rank), math.nan)
    lse = torch.full((batch, heads, length), math.inf)
    for b, keys in enumerate(seq_lens.tolist()):
        rows = cache[table[b].long()].flatten(0, 1)[:keys, 0].double()
        for t in range(length):
            seen = rows[: max(0, keys - length + 1 + t)] if causal else rows
            if len(seen):
                score = q[b, t].double() @ seen.T * scale
                out[b, t] = (score.softmax(-1) @ seen[:, :rank]).to(q.dtype)
                lse[b, :, t] = score.logsumexp(-1).float()
    return out, lse, schedule.clone(), splits.clone()


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Iterator[None]:
    library = torch.library.Library(SPACE, "DEF")
    library.define(SCHEMA)
    library.impl("dense_decode_fwd", dense_decode_fwd, "CPU")
    yield
    library._destroy()


class Counted:
    """The operator, with the schedules that it was given."""

    def __init__(self) -> None:
        self.schedules: list[Tensor | None] = []
        self.causal: list[bool] = []

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.schedules.append(args[7])
        self.causal.append(args[6])
        got: tuple[Tensor, Tensor, Tensor, Tensor] = getattr(torch.ops, SPACE).dense_decode_fwd(
            *args
        )
        return got


def on_cpu(operator: Any = None) -> FlashMLABackend:
    """Let it serve a CPU, for the stand-in alone."""
    backend = FlashMLABackend(operator=operator or Counted())
    backend.capabilities = dataclasses.replace(backend.capabilities, device_types=("cpu", "cuda"))
    return backend


def case_of(batch: str, **options: Any) -> Any:
    usual: dict[str, Any] = {"num_heads": 3, "dtype": torch.bfloat16}
    return make_case(batch, page_size=64, **(usual | options))


def needing(**changes: Any) -> Requirements:
    usual: dict[str, Any] = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "num_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
    }
    return Requirements(**(usual | changes))


@pytest.mark.parametrize("batch", ["1q1s70", "3q4s130", "3q2s64,1q2s200", "2q5s5", "2q0s7"])
@pytest.mark.parametrize("mask", [DraftMask.CAUSAL, DraftMask.FULL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gives_what_the_oracle_gives(batch: str, mask: DraftMask, dtype: torch.dtype) -> None:
    operator, case = Counted(), case_of(batch, mask=mask, dtype=dtype)
    assert_matches_oracle(case.attend(on_cpu(operator)), case, case.tables())
    assert operator.causal == [mask is DraftMask.CAUSAL] * len(operator.causal)


def test_rows_without_keys_get_the_empty_state() -> None:
    case = make_case([(4, 2), (4, 0), (4, 70)], num_heads=2, page_size=64, dtype=torch.bfloat16)
    got = case.attend(on_cpu())
    assert_matches_oracle(got, case, case.tables())
    assert torch.equal(got.lse.isneginf().all(1), got.lse.isneginf().any(1))
    assert got.lse.isneginf()[:, 0].tolist() == [True] * 2 + [False] * 2 + [True] * 4 + [False] * 4
    assert not got.out[got.lse.isneginf()].any()


def test_check_backend_passes() -> None:
    only = "^(totals|no-|wide|heads-(1|12|63)|rows-q(1|3)|tail-q2|page|slice|repeats|mask|refuses)"
    backend = on_cpu()
    dtypes = [torch.bfloat16, torch.float16]
    report = check_backend(backend, device="cpu", dtypes=dtypes, only=only)
    report.raise_if_failed()
    wanted = {"refuses-ragged", "refuses-mask-tree", "refuses-page_size-128", "no-keys-q4"}
    assert wanted <= set(report.passed)
    assert any(name.startswith("heads-63") for name in report.passed)
    assert any(name.startswith("mask-full") for name in report.passed)


def test_the_schedule_of_the_first_layer_serves_the_others() -> None:
    operator, case = Counted(), case_of("3q2s130")
    backend = on_cpu(operator)
    part = case.planned(backend)
    for _ in range(3):
        got = backend.forward_mqa(
            case.q_latent,
            case.q_rope,
            case.latent_cache,
            part,
            softmax_scale=case.softmax_scale,
        )
        assert_matches_oracle(got, case, case.tables())
    first, *later = operator.schedules
    assert first is None
    assert len(later) == 2
    assert all(schedule is not None for schedule in later)


def test_a_plan_of_the_same_shape_is_written_anew() -> None:
    operator, case, other = Counted(), case_of("3q2s130"), case_of("1q2s5,2q2s67")
    backend = on_cpu(operator)
    part = case.planned(backend)
    held = part.plan
    assert isinstance(held, FlashMLAPlan)
    backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )
    addresses = [t.data_ptr() for t in held.tensors()]
    table = other.tables()
    wide = dataclasses.replace(
        table,
        block_table=torch.nn.functional.pad(
            table.block_table,
            (0, part.block_table.shape[1] - table.block_table.shape[1]),
            value=2**31 - 1,
        ),
        plan=held,
    )
    again = backend.plan(wide, num_heads=3, kv_lora_rank=512, dtype=torch.bfloat16)
    assert again.plan is held
    assert held.schedule is None
    assert [t.data_ptr() for t in held.tensors()] == addresses
    got = backend.forward_mqa(
        other.q_latent, other.q_rope, other.latent_cache, again, softmax_scale=other.softmax_scale
    )
    assert_matches_oracle(got, other, table)
    assert operator.schedules == [None, None]
    fresh = backend.plan(wide, num_heads=4, kv_lora_rank=512, dtype=torch.bfloat16)
    assert fresh.plan is not held


def test_the_builder_serves_it_and_refuses_ragged_rows() -> None:
    backend = on_cpu()
    builder = MetadataBuilder(
        backend=backend,
        page_size=64,
        num_pages=8,
        num_heads=2,
        kv_lora_rank=512,
        device=torch.device("cpu"),
        max_seq_len=256,
        dtype=torch.bfloat16,
    )
    rows = [
        RequestRows(RequestKind.VERIFY, 2, 70, [3, 1]),
        RequestRows(RequestKind.VERIFY, 2, 64, [5]),
    ]
    part = builder.build(rows).verify
    assert part is not None
    assert part.plan.block_table.tolist() == [[3, 1], [5, 0]]
    with pytest.raises(ArgumentError, match="query_len"):
        builder.build([rows[0], rows[1]._replace(query_len=3)])


def plan(**changes: Any) -> Any:
    case = case_of(changes.pop("batch", "2q3s70"), **changes.pop("options", {}))
    return on_cpu().plan(
        dataclasses.replace(case.tables(), **changes),
        num_heads=3,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
    )


def test_forms_that_it_does_not_know_are_refused_with_all_reasons() -> None:
    tree = make_case("2q3s70,1q1s5", num_heads=3, page_size=16, mask=DraftMask.TREE)
    part = dataclasses.replace(tree.tables(), row_start=torch.zeros(7, dtype=torch.int32))
    with pytest.raises(ArgumentError) as raised:
        on_cpu().plan(part, num_heads=3, kv_lora_rank=512)
    for words in (
        "query_lens are [1, 3], accepted is one for all",
        "mask is 'tree', accepted are 'causal' and 'full'",
        "row_start is given, accepted is None",
        "page_size is 16, accepted is 64",
    ):
        assert words in str(raised.value)


def test_extents_of_a_shard_are_refused() -> None:
    case = case_of("2q3s70")
    extents = case.tables().row_extent.clone()
    extents[4] -= 1
    with pytest.raises(ArgumentError, match=r"row_extent of rows \[4\] is not .* \[69\]"):
        plan(row_extent=extents)
    assert plan(row_extent=case.tables().row_extent).plan is not None


def test_extents_that_nobody_read_give_nan() -> None:
    """On a GPU extents can't be looked at: such rows must not be wrong in silence."""
    case, backend = case_of("2q3s70"), on_cpu()
    part = case.planned(backend)
    odd = torch.zeros(6, 1, dtype=torch.bool)
    odd[4] = True
    part.plan.is_set |= odd
    part.plan.out.masked_fill_(odd, math.nan)
    part.plan.lse.masked_fill_(odd, math.nan)
    got = backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )
    assert got.out.isnan().flatten(1).all(1).tolist() == [False] * 4 + [True, False]
    assert got.lse.isnan().all(1).tolist() == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 16}, "page_size is 16, accepted are multiples of 64"),
        ({"page_size": 128}, "page_size is 128, accepted is 64"),
        ({"masks": frozenset({DraftMask.TREE})}, "masks ['tree'] are not served"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256, accepted are [512]"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32, accepted are [64]"),
        ({"query_len_support": QueryLenSupport.VARLEN}, "'varlen' is needed, 'uniform' is served"),
        ({"batch_invariant": True}, "batch_invariant is needed, accepted is another backend"),
        ({"device": torch.device("cpu")}, "device is 'cpu', accepted are ['cuda']"),
        ({}, "pip install --no-deps sgl-flash-mla, or FlashMLABackend(library=FILE)"),
    ],
    ids=lambda x: next(iter(x), "library") if isinstance(x, dict) else "",
)
def test_problems(changes: dict[str, Any], words: str) -> None:
    found = get_backend("flashmla").problems(needing(**changes))
    assert any(words in reason for reason in found), found


def test_all_problems_are_listed_at_once() -> None:
    found = FlashMLABackend().problems(needing(page_size=16, dtype=torch.float32, kv_lora_rank=64))
    assert len(found) == 4


def test_a_library_given_by_file(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    backend = FlashMLABackend(library=file)
    assert backend.unavailable() == [f"library is {file}, accepted is an existing file"]
    file.write_text("no library")
    backend = FlashMLABackend(library=str(file))
    assert backend.unavailable() == []
    (reason,) = backend.problems(needing())
    assert reason.startswith("lib.so can't be loaded: ")
    case = case_of("1q1s70")
    with pytest.raises(UnsupportedError, match=r"lib\.so can't be loaded"):
        case.attend(backend)
    with pytest.raises(ArgumentError, match="library and operator are given, accepted is one"):
        FlashMLABackend(library=file, operator=Counted())


def test_a_library_is_not_loaded_where_something_else_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_text("no library")
    found = FlashMLABackend(library=file).problems(needing(page_size=16))
    assert found == ["page_size is 16, accepted are multiples of 64"]


def test_calls_that_do_not_fit_the_plan() -> None:
    case, backend = case_of("2q3s70"), on_cpu()
    part = case.planned(backend)
    other = ReferenceBackend().plan(part, num_heads=3, kv_lora_rank=512)
    query = (case.q_latent, case.q_rope, case.latent_cache)
    for got, wrong, words in (
        (query, dataclasses.replace(part, plan=None), "part.plan is NoneType"),
        (query, other, "part.plan is GatherPlan"),
        ((case.q_latent[:, :2], case.q_rope[:, :2], query[2]), part, r"\(2, 3, 2\)"),
        (tuple(t.half() for t in query), part, "the step was planned for torch.bfloat16"),
    ):
        with pytest.raises(ArgumentError, match=words):
            backend.forward_mqa(*got, wrong, softmax_scale=1.0)


def test_an_lse_of_another_shape_is_refused() -> None:
    def odd(*args: Any) -> tuple[Tensor, ...]:
        out, lse, *rest = Counted()(*args)
        return out, lse.flatten(1), *rest

    with pytest.raises(ArgumentError, match="LSE of the operator is"):
        case_of("2q3s70").attend(on_cpu(odd))


def test_the_plan_holds_what_was_counted() -> None:
    case, backend = case_of("3q2s130"), on_cpu()
    part = case.planned(backend)
    here = StepSize.of(part, 3, 512, torch.bfloat16)
    size = dataclasses.replace(here, device=Device("sm_90", 132))
    held = sum(t.numel() * t.element_size() for t in part.plan.tensors())
    assert held == total_bytes(backend.scratch(size))
    with pytest.raises(UnsupportedError, match="architecture is interpreter, accepted is sm_90"):
        backend.scratch(here)


def test_it_is_never_preferred() -> None:
    priorities = {n: get_backend(n).capabilities.priority for n in ("hopper", "triton", "rows")}
    assert FlashMLABackend.capabilities.priority < min(priorities.values())
