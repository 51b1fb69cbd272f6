"""The computing parts of the training script, each against an independent computation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pairtrain.acceptance import distinct_4grams, run_chains
from pairtrain.losses import distillation_loss, next_token_loss
from pairtrain.network import Network
from pairtrain.sampler import LatentSampler
from pairtrain.size import ModelSize

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Network:
    """Weights large enough that logits differ and positions matter."""
    network = Network.create(ModelSize(2, 32, 3, 48), 300, CPU, seed=0, compile=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in network.model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.4, generator=generator)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
    return network


def test_network_is_the_models_own_forward(network: Network) -> None:
    tokens = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = network.model.forward_full(tokens)
        found = network.model.logits(network.hidden(tokens))
        at = torch.tensor([[0, 49], [7, 7], [48, 1]])
        picked = network.logits_at(tokens, at)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(picked, found[torch.arange(3)[:, None], at])


class TestLatentSampler:
    def test_greedy_follows_the_full_forward(self, network: Network) -> None:
        sampler = LatentSampler(network.model.state_dict(), network.config, torch.float32)
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(0, 300, (6, 5), generator=generator)
        tokens = sampler.extend(prompts, 40, torch.zeros(6), generator)
        assert torch.equal(tokens[:, :5], prompts)
        with torch.no_grad():
            best = network.model.forward_full(tokens).argmax(-1)
        assert torch.equal(tokens[:, 5:], best[:, 4:-1])

    def test_temperature_one_has_the_models_distribution(self, network: Network) -> None:
        count = 20_000
        prompt = torch.tensor([[3, 1, 4]])
        sampler = LatentSampler(network.model.state_dict(), network.config, torch.float32)
        generator = torch.Generator().manual_seed(4)
        tokens = sampler.extend(prompt.expand(count, -1), 4, torch.ones(count), generator)
        with torch.no_grad():
            expected = network.model.forward_full(prompt)[0, -1].softmax(-1) * count
        assert chi_square_z(tokens[:, 3].bincount(minlength=300), expected) < 4


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard score of Pearson's statistic; cells expecting fewer than 5 are pooled."""
    large = expected >= 5
    counts = torch.cat((counts[large], counts[~large].sum()[None])).double()
    expected = torch.cat((expected[large], expected[~large].sum()[None])).double()
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = len(counts) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


class TestLosses:
    def test_equal_the_sums_in_float64(self) -> None:
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(2, 7, 8, generator=generator)
        head = torch.randn(11, 8, generator=generator)
        logits = 3 * torch.randn(2, 7, 11, generator=generator)
        p = logits.double().softmax(-1)
        q = (hidden.double() @ head.double().T).softmax(-1)
        divergence = (p * (p.log() - q.log())).sum(-1).mean()
        overlap = torch.minimum(p, q).sum(-1).mean()
        for share in (0.0, 0.3, 1.0):
            loss, kl, tv = distillation_loss(hidden, head, logits, torch.tensor(share))
            assert kl.item() == pytest.approx(divergence.item(), rel=1e-4)
            assert 1 - tv.item() == pytest.approx(overlap.item(), rel=1e-4)
            mixed = (1 - share) * divergence + share * (1 - overlap)
            assert loss.item() == pytest.approx(mixed.item(), rel=1e-4)
        targets = torch.randint(0, 11, (2, 7), generator=generator)
        expected = -q.gather(-1, targets[..., None]).log().mean()
        found = next_token_loss(hidden, head, targets)
        assert found.item() == pytest.approx(expected.item(), rel=1e-4)


class MarkovModel:
    """Logits that depend on the last token only, of few ids."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(vocab, vocab, generator=generator)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.table[tokens.gather(1, positions)]


class TestRunChains:
    def run(
        self, target: MarkovModel, draft: MarkovModel, temperature: float, prompts: int = 50
    ) -> dict[str, object]:
        rows = [torch.arange(1 + i % 4) for i in range(prompts)]
        return run_chains(
            target,
            draft,
            rows,
            num_drafts=4,
            new_tokens=20,
            temperature=temperature,
            generator=torch.Generator().manual_seed(0),
        ).summary()["with_loops"]  # type: ignore[return-value]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_target_itself_is_always_accepted(self, temperature: float) -> None:
        model = MarkovModel(6, seed=0)
        found = self.run(model, model, temperature)
        assert found["tokens_per_step"] == 5
        assert found["acceptance_by_position"] == [1, 1, 1, 1]

    def test_a_wrong_greedy_draft_is_never_accepted(self) -> None:
        model, wrong = MarkovModel(6, seed=0), MarkovModel(6, seed=0)
        wrong.table = -wrong.table
        assert self.run(model, wrong, 0.0)["tokens_per_step"] == 1

    def test_acceptance_is_one_minus_total_variation(self) -> None:
        target, draft = MarkovModel(5, seed=1), MarkovModel(5, seed=2)
        target.table[:], draft.table[:] = target.table[0].clone(), draft.table[0].clone()
        p, q = target.table[0].softmax(-1), draft.table[0].softmax(-1)
        rate = torch.minimum(p, q).sum().item()
        found = self.run(target, draft, 1.0, prompts=2000)["acceptance_by_position"]
        expected = [rate ** (i + 1) for i in range(4)]
        assert found == pytest.approx(expected, abs=0.015)

    def test_sampled_text_has_the_targets_distribution(self) -> None:
        target, draft, count = MarkovModel(5, seed=3), MarkovModel(5, seed=4), 4000
        seen = torch.zeros(5, 5, dtype=torch.int64)

        def recording(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if (positions[:, 0] == 0).any():
                return target(tokens, positions)
            fresh = positions[:, 0] >= 2  # the two tokens after the prompt are settled
            first = tokens[fresh & ~done, 1:3]
            done[fresh] = True
            seen.index_put_((first[:, 0], first[:, 1]), torch.ones(len(first)).long(), True)
            return target(tokens, positions)

        done = torch.zeros(count, dtype=torch.bool)
        run_chains(
            recording,
            draft,
            [torch.tensor([2])] * count,
            num_drafts=3,
            new_tokens=12,
            temperature=1.0,
            generator=torch.Generator().manual_seed(5),
        )
        table = target.table.softmax(-1)
        expected = (table[2][:, None] * table * count).flatten()
        assert seen.sum() == count
        assert chi_square_z(seen.flatten(), expected) < 4

    def test_loops_are_left_out_of_the_averages(self) -> None:
        shift = 10 * torch.eye(40).roll(1, dims=1)  # i is followed by i + 1 ...
        shift[7] = 10 * torch.eye(40)[7]  # ... and 7 by itself for ever
        model = MarkovModel(40, seed=0)
        model.table = shift
        result = run_chains(
            model,
            model,
            [torch.tensor([8]), torch.tensor([7])],
            num_drafts=4,
            new_tokens=20,
            temperature=0.0,
            generator=torch.Generator(),
        ).summary()
        assert result["looping_excluded"] == 1
        assert result["distinct_4gram_ratio"] == 1.0


def test_distinct_4grams() -> None:
    assert distinct_4grams([1, 2, 3]) == 1.0
    assert distinct_4grams(list(range(10))) == 1.0
    assert distinct_4grams([5] * 10) == pytest.approx(1 / 7)
