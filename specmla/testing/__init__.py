"""Test kit for kernels and backends: batch grammar, hostile inputs, error budgets.

Needs nothing but torch and the library. The whole test of a backend:

    check_backend(backend, device="cuda").raise_if_failed()

One case by itself:

    case = make_case("3q5s65,1q0s7", num_heads=12, kv_lora_rank=64, rope_dim=16, page_size=16)
    assert_matches_oracle(case.attend(backend), case, case.tables())
"""

from specmla.testing.batch import RequestLens, parse_batch
from specmla.testing.budget import (
    assert_attention_within_budget,
    assert_lse_within_budget,
    assert_within_budget,
    relative_error,
    row_errors,
)
from specmla.testing.case import (
    DEEPSEEK_SCALE,
    QUERY_LAYOUTS,
    CaseSpec,
    VerifyCase,
    make_case,
    random_parents,
)
from specmla.testing.check import check_backend
from specmla.testing.check_drafter import DrafterReport, check_drafter
from specmla.testing.check_report import CheckReport
from specmla.testing.interpreted_dots import dots_by_row
from specmla.testing.oracle import Oracle, assert_matches_oracle, run_oracle
from specmla.testing.prompts import PromptCase, make_prompt_case
from specmla.testing.tables import ABSURD_PAGE, make_verify_part, overwrite_unused_cells

__all__ = [
    "ABSURD_PAGE",
    "DEEPSEEK_SCALE",
    "QUERY_LAYOUTS",
    "CaseSpec",
    "CheckReport",
    "DrafterReport",
    "Oracle",
    "PromptCase",
    "RequestLens",
    "VerifyCase",
    "assert_attention_within_budget",
    "assert_lse_within_budget",
    "assert_matches_oracle",
    "assert_within_budget",
    "check_backend",
    "check_drafter",
    "dots_by_row",
    "make_case",
    "make_prompt_case",
    "make_verify_part",
    "overwrite_unused_cells",
    "parse_batch",
    "random_parents",
    "relative_error",
    "row_errors",
    "run_oracle",
]
