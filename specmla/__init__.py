"""The verify step of speculative decoding for models with Multi-head Latent Attention."""

from specmla.backends.base import (
    AttentionBackend,
    AttentionOutput,
    Capabilities,
    GraphSupport,
    Requirements,
)
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.select import Selection, choose_backend, get_backend, select_backend
from specmla.backends.with_prompts import WithPrompts, get_prompt_kernel
from specmla.batch_split import BatchRules
from specmla.bucket import Bucket
from specmla.budget.base import Budget, BudgetRequest
from specmla.budget.batch_table import BatchTableBudget
from specmla.budget.fixed import FixedBudget
from specmla.budget.gate import Gate, StopRule, SurvivalThreshold, ThroughputStop
from specmla.budget.history import HistoryBudget
from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.copies import fill_copies
from specmla.cache.formats import CacheFormat, cache_format
from specmla.cache.latent import LatentCache
from specmla.cache.layout import CacheLayout
from specmla.capture import CapturedMetadata
from specmla.compiling import as_operators
from specmla.config import MLAConfig, YarnScaling, read_rope
from specmla.e4m3_up_projection import E4M3UpProjection
from specmla.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    CheckpointError,
    ConstraintError,
    IntegrityError,
    NumericsError,
    PoolFullError,
    SpecMLAError,
    UnsupportedError,
)
from specmla.generate import build_step, generate
from specmla.invariance import make_batch_invariant
from specmla.layer import MLAAttention
from specmla.mask import DraftMask
from specmla.metadata import (
    PrefillPart,
    RequestKind,
    RequestRows,
    StepMetadata,
    VerifyPart,
)
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM
from specmla.models.grouped_experts import group_experts
from specmla.models.mtp import MTPModule, load_mtp
from specmla.models.parts import load_part, read_part_config, save_part
from specmla.models.states import FINAL, StateCollector
from specmla.models.weights import load_checkpoint, reload_checkpoint, save_checkpoint
from specmla.quant_key import QuantKey
from specmla.quant_output import QuantOutput
from specmla.query import QueryLenSupport, pad_heads, reshape_query_for_spec_decode
from specmla.query_form import Fp8Query
from specmla.reference import merge_attention_states
from specmla.rope import RopeAngles, RotaryEmbedding
from specmla.staging import send_arrays
from specmla.verify.captured import CapturedStep
from specmla.verify.captured_buckets import doubling_buckets
from specmla.verify.captured_chain_rows import PendingRows
from specmla.verify.captured_chains import CapturedChains, ChainNetwork
from specmla.verify.captured_overlap import CapturedOverlap
from specmla.verify.captured_sheet import CapturedSheet, DrawnDrafts
from specmla.verify.draft_graphs import DraftGraphs, DraftInputs
from specmla.verify.draw import sample
from specmla.verify.hidden import committed_rows
from specmla.verify.overlap import OverlappedStep
from specmla.verify.overlap_plan import DraftsAhead
from specmla.verify.processors.constraint import TokenConstraint
from specmla.verify.proposal import (
    Drafter,
    DraftProposal,
    DraftRequest,
    HiddenRows,
    RequestResult,
)
from specmla.verify.rules.lossy_relaxed import LossyRelaxed
from specmla.verify.rules.lossy_typical import LossyTypical
from specmla.verify.rules.terms import Ending, Rule, RuleTerms
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.sampling_cache import SamplingCache
from specmla.verify.sibling_draws import draw_siblings
from specmla.verify.sparse import SparseProbs
from specmla.verify.stats import AcceptanceStats
from specmla.verify.step import VerifyStep
from specmla.verify.streams import Stream, uniforms
from specmla.verify.vocab import check_vocab, pad_vocab
from specmla.workspace import PrefillWorkspace, workspace_rows

__version__ = "0.1.0"

__all__ = [
    "FINAL",
    "AcceptanceStats",
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionBackend",
    "AttentionOutput",
    "BatchRules",
    "BatchTableBudget",
    "BlockManager",
    "Bucket",
    "Budget",
    "BudgetRequest",
    "BusyError",
    "CacheFormat",
    "CacheLayout",
    "Capabilities",
    "CapturedChains",
    "CapturedMetadata",
    "CapturedOverlap",
    "CapturedSheet",
    "CapturedStep",
    "ChainNetwork",
    "CheckpointError",
    "ConstraintError",
    "DeepseekConfig",
    "DeepseekDecoderLayer",
    "DeepseekForCausalLM",
    "DraftGraphs",
    "DraftInputs",
    "DraftMask",
    "DraftProposal",
    "DraftRequest",
    "Drafter",
    "DraftsAhead",
    "DrawnDrafts",
    "E4M3UpProjection",
    "Ending",
    "FixedBudget",
    "FixedHeads",
    "Fp8Query",
    "Gate",
    "GraphSupport",
    "HiddenRows",
    "HistoryBudget",
    "IntegrityError",
    "LatentCache",
    "LossyRelaxed",
    "LossyTypical",
    "MLAAttention",
    "MLAConfig",
    "MTPModule",
    "MetadataBuilder",
    "NumericsError",
    "OverlappedStep",
    "PendingRows",
    "PoolFullError",
    "PrefillPart",
    "PrefillWorkspace",
    "QuantKey",
    "QuantOutput",
    "QueryLenSupport",
    "RequestKind",
    "RequestResult",
    "RequestRows",
    "Requirements",
    "RopeAngles",
    "RotaryEmbedding",
    "Rule",
    "RuleTerms",
    "SamplingBatch",
    "SamplingCache",
    "SamplingParams",
    "Selection",
    "SparseProbs",
    "SpecMLAError",
    "StateCollector",
    "StepMetadata",
    "StopRule",
    "Stream",
    "SurvivalThreshold",
    "ThroughputStop",
    "TokenConstraint",
    "UnsupportedError",
    "VerifyPart",
    "VerifyStep",
    "WithPrompts",
    "YarnScaling",
    "as_operators",
    "build_step",
    "cache_format",
    "check_vocab",
    "choose_backend",
    "committed_rows",
    "doubling_buckets",
    "draw_siblings",
    "fill_copies",
    "generate",
    "get_backend",
    "get_prompt_kernel",
    "group_experts",
    "load_checkpoint",
    "load_mtp",
    "load_part",
    "make_batch_invariant",
    "merge_attention_states",
    "pad_heads",
    "pad_vocab",
    "processed_probs",
    "read_part_config",
    "read_rope",
    "reload_checkpoint",
    "reshape_query_for_spec_decode",
    "sample",
    "save_checkpoint",
    "save_part",
    "select_backend",
    "send_arrays",
    "uniforms",
    "workspace_rows",
]
