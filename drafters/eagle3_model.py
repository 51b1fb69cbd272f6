"""The network of an EAGLE-3 head (arXiv:2503.01840) with an MLA layer.

Three states of the target, from a low, a middle and a high layer, become one: h_i = fc [a ; b ; c].
For the token after it, with the state in the residual stream,

    y = h_i + attention [input_layernorm(Emb(t_{i+1})) ; hidden_norm(h_i)]
    g = y + mlp(post_attention_layernorm(y)),    logits of t_{i+2} = lm_head(norm(g))

For later depths g takes the place of h. The head knows a part of the vocabulary only: its id j is
the target's j + d2t[j]. Names and files are those of EAGLE-3 checkpoints, `midlayer` and all.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters.eagle3_config import Eagle3Config, check_eagle3
from specmla import (
    ArgumentError,
    CheckpointError,
    DeepseekConfig,
    DeepseekDecoderLayer,
    DeepseekForCausalLM,
    MLAAttention,
    RotaryEmbedding,
    load_part,
    read_part_config,
)


class Eagle3Layer(DeepseekDecoderLayer):
    """A decoder layer whose attention looks at embedding and state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        dims = config.attention
        super().__init__(DeepseekConfig(dims, 1, config.vocab_size, config.intermediate_size, 1), 0)
        hidden = dims.hidden_size
        self.hidden_norm = nn.RMSNorm(hidden, eps=dims.rms_norm_eps)
        self.self_attn = MLAAttention(dataclasses.replace(dims, hidden_size=2 * hidden))
        width = dims.num_heads * dims.v_head_dim
        self.self_attn.o_proj = nn.Linear(width, hidden, bias=dims.attention_bias)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Give the attention's input `[..., 2 D]`."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add attention `[..., D]`, then the MLP, to the residual stream."""
        hidden = hidden + attended
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class Eagle3Model(nn.Module):
    """Fusion, one layer and a head of its own; the embedding is the target's.

    Attributes:
        d2t: [draft_vocab_size] int64, what is added to a draft id to give the target's.
    """

    d2t: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.attention.hidden_size, config.attention.rms_norm_eps
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config.attention)
        nothing = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", nothing, persistent=False)

    @property
    def target_ids(self) -> Tensor:
        """The target's id [draft_vocab_size] of every draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def logits(self, hidden: Tensor) -> Tensor:
        """Map states `[..., D]` to logits `[..., draft_vocab_size]`."""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found


def load_eagle3(
    directory: str | Path, target: DeepseekForCausalLM, dtype: torch.dtype | None = None
) -> Eagle3Model:
    """Load an EAGLE-3 checkpoint with an MLA layer on the target's device.

    Raises:
        CheckpointError: damaged files, other tensors, or a config that can't be served with this
            target; every reason is named.
    """
    try:
        config = Eagle3Config.from_hf(read_part_config(directory))
    except ArgumentError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    check_eagle3(config, target.config, str(directory))
    weight = target.model.embed_tokens.weight
    model = load_part(
        lambda: Eagle3Model(config),
        directory,
        shared=("d2t", "t2d", "embed_tokens.weight"),
        device=weight.device,
        dtype=dtype or weight.dtype,
    )
    model.d2t = _read_d2t(Path(directory), config).to(weight.device)
    return model


def save_eagle3(model: Eagle3Model, directory: str | Path) -> None:
    """Write config.json and model.safetensors, d2t and t2d included."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    known = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    known[model.target_ids.cpu()] = True
    maps = {"d2t": model.d2t.cpu(), "t2d": known}
    save_file(state | maps, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(model.fc.weight.dtype).removeprefix("torch.")
    text = json.dumps({**model.config.to_hf(), "dtype": dtype}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _read_d2t(folder: Path, config: Eagle3Config) -> Tensor:
    """Read the map; without one draft ids are the target's, which takes equal vocabularies."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if "d2t" in file.keys():  # noqa: SIM118 - the file is no mapping
                found: Tensor = file.get_tensor("d2t").long()
                break
    else:
        found = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    ids = torch.arange(len(found)) + found
    fits = len(found) == config.draft_vocab_size and len(ids.unique()) == len(ids)
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise CheckpointError(
            f"{folder}: d2t has {len(found)} entries, accepted are {config.draft_vocab_size} that "
            f"give different ids below {config.vocab_size}"
        )
    return found
