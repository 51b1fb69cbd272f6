"""Drafters under training compute what they compute when they serve, and the script end to end."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_drafter  # noqa: E402
from drafters import load_block_model, load_eagle3  # noqa: E402
from pairtrain.block_trainee import BlockTrainee  # noqa: E402
from pairtrain.draft_loss import row_loss  # noqa: E402
from pairtrain.eagle3_trainee import Eagle3Trainee, commonest, subset_loss  # noqa: E402
from pairtrain.frozen_target import FrozenTarget, TargetRows  # noqa: E402
from pairtrain.mtp_trainee import MTPTrainee  # noqa: E402
from pairtrain.network import Network  # noqa: E402
from pairtrain.size import ModelSize  # noqa: E402
from pairtrain.tokenizer import train_tokenizer  # noqa: E402
from specmla import YarnScaling, load_mtp, save_checkpoint  # noqa: E402
from tests.drafters.eagle3_network import eagle3_logits, tiny_eagle3  # noqa: E402
from tests.drafters.networks import (  # noqa: E402
    VOCAB,
    block_logits,
    mtp_logits,
    randomise,
    tiny_block,
    tiny_target,
)

CPU = torch.device("cpu")
METHODS = ("mtp", "eagle3", "dflash", "dspark")


@pytest.fixture(scope="module", params=["plain", "yarn"])
def frozen(request, tmp_path_factory) -> FrozenTarget:
    target, folder = tiny_target(), tmp_path_factory.mktemp("target")
    save_checkpoint(target, folder)
    if request.param == "yarn":
        path = folder / "config.json"
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        config = json.loads(path.read_text()) | {"rope_scaling": scaling}
        path.write_text(json.dumps(config))
    made = FrozenTarget(folder, CPU, compile=False)
    assert isinstance(made.config.attention.rope_scaling, YarnScaling) == (request.param == "yarn")
    return made


def rows_of(frozen: FrozenTarget, layers) -> TargetRows:
    generator = torch.Generator().manual_seed(3)
    return frozen.run(torch.randint(VOCAB - 1, (2, 25), generator=generator), layers)


@torch.no_grad()
def test_mtp_depths_are_those_of_a_drafter_behind_every_anchor(frozen):
    trainee = MTPTrainee(frozen, 3, 1, row_loss)
    randomise(trainee.module, 4)
    rows = rows_of(frozen, ())
    outputs = list(trainee.outputs(rows))
    for anchor in (2, 9, 21):
        tokens = rows.tokens[1].tolist()
        for depth, out in enumerate(outputs):
            drafts = tokens[anchor + 1 : anchor + 1 + depth]
            want = mtp_logits(frozen.model, trainee.module, tokens[: anchor + 1], drafts)
            got = frozen.model.logits(out[1, anchor - 1 + depth])
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_eagle3_depths_are_those_of_a_drafter_behind_every_anchor(frozen):
    config = tiny_eagle3(frozen.model).config
    config = dataclasses.replace(config, attention=frozen.config.attention)
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    trainee = Eagle3Trainee(config, frozen, ids, 3, 1, subset_loss)
    randomise(trainee.module, 4)
    rows = rows_of(frozen, config.target_layer_ids)
    for depth, out in enumerate(trainee.outputs(rows)):
        for anchor in (2, 9, 21):
            tokens = rows.tokens[1].tolist()
            drafts = tokens[anchor + 1 : anchor + 1 + depth]
            want = eagle3_logits(frozen.model, trainee.head, tokens[: anchor + 1], drafts)
            got = trainee.head.logits(out[1, anchor - 1 + depth])
            torch.testing.assert_close(got, want[ids], atol=1e-4, rtol=1e-3)


def test_subset_loss_is_the_divergence_then_the_variation():
    generator = torch.Generator().manual_seed(0)
    teacher, head = (torch.randn(n, 6, generator=generator) for n in (9, 20))
    ids = torch.tensor([1, 2, 5, 11, 19])
    logits, weight = torch.randn(9, 5, generator=generator), torch.rand(9, generator=generator)
    p, q = (teacher @ head.T).softmax(-1), torch.zeros(9, 20)
    q[:, ids] = logits.softmax(-1)
    accepted, share = torch.minimum(p, q).sum(-1), weight / weight.sum()
    part = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    divergence = (part * (part / q[:, ids]).log()).sum(-1)
    for mix in (0.0, 0.25, 1.0):
        found = subset_loss(logits, ids, teacher, head, weight, torch.tensor(mix))
        want = (((1 - mix) * divergence + mix * (1 - accepted)) * share).sum()
        torch.testing.assert_close(found.loss, want)
    torch.testing.assert_close(1 - found.variation, accepted)
    assert torch.equal(found.match, p.argmax(-1) == q.argmax(-1))
    assert commonest(torch.tensor([3, 1, 3, 4, 4, 3]), 2, 6).tolist() == [3, 4]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks_are_those_of_a_drafter_behind_the_same_anchor(frozen, kind):
    attention = frozen.config.attention
    config = tiny_block(frozen.model, kind, attention=attention).config
    trainee = BlockTrainee(config, frozen, 1, row_loss)
    randomise(trainee.module, 4)
    rows = rows_of(frozen, config.target_layer_ids)
    anchors = torch.tensor([[3, 17], [5, 11]])
    outputs = trainee.outputs(rows, anchors)
    assert outputs.shape[:3] == (2, 2, config.num_drafts)
    for i, anchor in enumerate(anchors[1].tolist()):
        tokens = rows.tokens[1].tolist()
        for j in range(config.num_drafts):
            drafts = tokens[anchor + 1 : anchor + 1 + j]
            want = block_logits(frozen.model, trainee.module, tokens[: anchor + 1], drafts)
            got = frozen.model.logits(outputs[1, i, j])
            if kind == "dspark":
                previous = torch.tensor(tokens[anchor + j])
                got = got + trainee.module.markov_logits(trainee.module.markov_state(previous))
            got[config.mask_token_id] = -torch.inf
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_row_loss_is_the_divergence_then_the_variation():
    generator = torch.Generator().manual_seed(0)
    hidden, teacher, head = (torch.randn(n, 6, generator=generator) for n in (9, 9, 20))
    bias, weight = torch.randn(9, 20, generator=generator), torch.rand(9, generator=generator)
    p = (teacher @ head.T).softmax(-1)
    q = (hidden @ head.T + bias).softmax(-1)
    share = weight / weight.sum()
    divergence = (torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1) * share).sum()
    accepted = torch.minimum(p, q).sum(-1)
    for mix in (0.0, 0.25, 1.0):
        found = row_loss(hidden, bias, teacher, head, weight, torch.tensor(mix))
        want = (1 - mix) * divergence + mix * ((1 - accepted) * share).sum()
        torch.testing.assert_close(found.loss, want)
    torch.testing.assert_close(1 - found.variation, accepted)
    assert torch.equal(found.match, p.argmax(-1) == q.argmax(-1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of all methods for a small random target."""
    root, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("drafters")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "ast.py", "bisect.py", "heapq.py"):
        shutil.copy(stdlib / name, root / name)
    tokenizer = train_tokenizer([(root / "argparse.py").read_text()], 512, 100_000)
    network = Network.create(ModelSize.parse("3x32"), 512, CPU, 0, compile=False)
    randomise(network.model, 5)
    network.save(out / "target")
    tokenizer.save(str(out / "target" / "tokenizer.json"))
    train_drafter.main(
        [
            *("--method", *METHODS, "--target", str(out / "target"), "--out", str(out)),
            *("--roots", str(root), "--device", "cpu", "--no-compile", "--workers", "1"),
            *("--steps", "24", "--window", "32", "--batch", "8", "--pool", "4", "--drafts", "2"),
            *(
                "--block",
                "3",
                "--draft-vocab",
                "300",
                "--num-layers",
                "1",
                "--markov-rank",
                "8",
                "--rate",
                "5e-3",
            ),
            *("--prompts", "2", "--new-tokens", "6"),
        ]
    )
    return out


def test_the_script_writes_drafters_that_load_report_and_plot(trained):
    report = json.loads((trained / "report.json").read_text())
    assert report["training"]["steps"] == 24
    assert set(report["evaluation"]) == {"ngram", *METHODS}
    for name in METHODS:
        for kind in ("greedy", "temperature_1"):
            assert 1 <= report["evaluation"][name][kind]["tokens_per_step"] <= 4
        assert len(report["training"]["held_out"][name]["acceptance_by_position"]) == (
            2 if name in ("mtp", "eagle3") else 3
        )
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    target = FrozenTarget(trained / "target", CPU, compile=False)
    assert load_mtp(trained / "mtp", target.model).eh_proj.weight.shape == (32, 64)
    assert load_eagle3(trained / "eagle3", target.model).target_ids.shape == (300,)
    for name in ("dflash", "dspark"):
        model = load_block_model(trained / name, target.model)
        assert model.has_markov == (name == "dspark")


def test_losses_fall(trained):
    report = json.loads((trained / "report.json").read_text())
    for name in METHODS:
        points = report["curves"]["KL to the target"][f"{name} held out"]
        assert points[-1][1] < 0.9 * points[0][1]


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(11, 3, (1, 4, 8)), (11, 1, (5,)), (61, 5, (1, 15, 30, 44, 58))],
)
def test_layers_are_spread_from_the_second_to_the_last_but_two(layers, count, expected):
    assert train_drafter.spread_layers(layers, count) == expected


@pytest.mark.parametrize(
    ("layers", "expected"), [(61, (1, 29, 57)), (11, (1, 4, 7)), (3, (0, 1, 2))]
)
def test_eagle3_takes_low_middle_and_high_layers(layers, expected):
    assert train_drafter.low_middle_high(layers) == expected


def test_a_target_that_can_not_be_sampled_from_asks_for_pool_0(trained, tmp_path):
    shutil.copytree(trained / "target", tmp_path / "target")
    target = tiny_target()
    save_checkpoint(target, tmp_path / "target")
    given = ["--method", "mtp", "--target", str(tmp_path / "target"), "--out", str(tmp_path)]
    given += [
        "--roots",
        str(Path(__file__).parent),
        "--workers",
        "1",
        "--device",
        "cpu",
        "--no-compile",
    ]
    with pytest.raises(SystemExit, match="its head is not its embedding: give --pool 0"):
        train_drafter.main([*given, "--held-out-percent", "50"])
