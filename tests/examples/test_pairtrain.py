"""The parts of the training script, each against an independent account of what it should do."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pairtrain.acceptance import distinct_4grams, run_chains
from pairtrain.corpus import is_held_out, load_corpus, seen_before
from pairtrain.losses import distillation_loss, next_token_loss
from pairtrain.network import Network
from pairtrain.sampler import LatentSampler
from pairtrain.schedule import Schedule, rate_factor
from pairtrain.size import ModelSize
from pairtrain.source import read_source
from pairtrain.tokenizer import END_OF_TEXT_ID, encode_files, train_tokenizer
from pairtrain.windows import TokenWindows

CPU = torch.device("cpu")
HELD_OUT, TRAINED = "heapq", "bisect"  # by their hashes, at 4 percent


def code(seed: int, lines: int = 40) -> str:
    return "".join(f"value_{seed}_{i} = function_{seed}({i})\n" for i in range(lines))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class TestCorpus:
    def test_splits_by_top_level_name(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            {
                f"{HELD_OUT}/a.py": code(1),
                f"{HELD_OUT}/deep/{TRAINED}.py": code(2),
                f"{TRAINED}.py": code(3),
                f"json/{HELD_OUT}.py": code(4),
            },
        )
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert {file.module for file in corpus.held_out} == {HELD_OUT}
        assert {file.module for file in corpus.train} == {TRAINED, "json"}
        assert len(corpus.held_out) == len(corpus.train) == 2

    def test_copy_of_a_held_out_file_leaves_the_training_part(self, tmp_path: Path) -> None:
        write(tmp_path, {f"{HELD_OUT}.py": code(1), f"{TRAINED}/vendored/{HELD_OUT}.py": code(1)})
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert [file.name for file in corpus.held_out] == [f"{HELD_OUT}.py"]
        assert corpus.train == ()
        assert corpus.duplicates == 1

    def test_drops_exact_and_near_duplicates(self, tmp_path: Path) -> None:
        text = code(1)
        write(
            tmp_path,
            {
                "json/a.py": text,
                "json/licensed.py": f"# Licence\n# of many lines\n\n{text}",
                "json/indented.py": "if True:\n" + text.replace("value", "    value"),
                "json/one_more.py": text + "value = 1234\n",
                "json/half_new.py": code(1, 20) + code(2, 20),
            },
        )
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        kept = {file.name for file in corpus.train}
        assert len(kept) == 2
        assert "json/half_new.py" in kept

    def test_stops_at_the_size_asked_for(self, tmp_path: Path) -> None:
        write(tmp_path, {f"json/m{i}.py": code(i) for i in range(20)})
        size = len(code(10))
        corpus = load_corpus([tmp_path], 3 * size, 4, workers=1)
        assert 3 <= len(corpus.train) <= 4

    def test_does_not_depend_on_the_number_of_processes(self, tmp_path: Path) -> None:
        write(tmp_path, {f"m{i}/a.py": code(i) for i in range(30)})
        one, two = (load_corpus([tmp_path], 10**6, 50, workers=n) for n in (1, 2))
        assert [file.name for file in one.train] == [file.name for file in two.train]
        assert one.summary() == two.summary()

    def test_nested_site_packages_are_another_root(self, tmp_path: Path) -> None:
        write(tmp_path, {"json.py": code(1), "site-packages/other/a.py": code(2)})
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert [file.name for file in corpus.train] == ["json.py"]

    def test_share_held_out_is_near_the_percentage(self) -> None:
        share = sum(is_held_out(f"module{i}", 4) for i in range(10_000)) / 10_000
        assert 0.034 < share < 0.046

    def test_seen_before_counts_earlier_arrays_only(self) -> None:
        parts = [[1, 2, 3, 4], [3, 4, 5, 6], [], [1, 6], [9]]
        shares = seen_before([np.array(part, dtype=np.int64) for part in parts])
        assert shares.tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (code(1).encode(), True),
        (b"# only\n" * 50 + code(1).encode(), True),
        (b"x = 1\n", False),
        (b"\xff\xfe" + code(1).encode(), False),
        (b"x = '" + b"a" * 5000 + b"'\n", False),
        (code(1, 20_000).encode(), False),
    ],
    ids=["code", "header", "tiny", "not utf-8", "data", "huge"],
)
def test_read_source_takes_code_only(tmp_path: Path, content: bytes, kept: bool) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(content)
    file = read_source(path, "a.py")
    assert (file is not None) == kept
    if file:
        assert file.text == code(1)


def test_tokenizer_is_lossless_and_ends_files() -> None:
    tokenizer = train_tokenizer([code(i) for i in range(5)], 290, 10**6)
    assert tokenizer.get_vocab_size() == 290
    texts = ["def f():\n\treturn 'Grüße 🙂 \\x00'\r\n", "", code(7)]
    tokens = encode_files(tokenizer, texts)
    assert tokens.dtype == np.int16
    ends = np.flatnonzero(tokens == END_OF_TEXT_ID)
    assert len(ends) == len(texts)
    parts = np.split(tokens, ends + 1)[:-1]
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == texts


class TestTokenWindows:
    def test_windows_are_consecutive_and_reach_both_ends(self) -> None:
        windows = TokenWindows(torch.arange(20, dtype=torch.int16), 5)
        drawn = windows.draw(500, torch.Generator().manual_seed(0))
        assert (drawn.diff(dim=1) == 1).all()
        assert set(drawn[:, 0].tolist()) == set(range(16))
        assert windows.spread(4)[:, 0].tolist() == [0, 5, 10, 15]

    def test_short_corpus_is_named(self) -> None:
        with pytest.raises(ValueError, match="holds 3 tokens, a window needs 5"):
            TokenWindows(torch.zeros(3, dtype=torch.int16), 5)


class TestSchedule:
    def test_rate_rises_stays_and_falls_to_nothing(self) -> None:
        rates = [rate_factor(i / 1000) for i in range(1001)]
        assert 0 < rates[0] < 0.05
        assert max(rates) == 1.0
        assert rates[1000] == 0.0
        assert all(a >= b for a, b in pairwise(rates[20:]))

    def test_steps_or_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [Schedule(9, 4).progress(step) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]
        now = [100.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        schedule = Schedule(0.5, None)
        now[0] += 1000
        assert schedule.progress(7) == 0  # compiling is not training
        schedule.start()
        now[0] += 15
        assert schedule.progress(8) == 0.5


def test_model_size_reads_what_it_writes() -> None:
    assert ModelSize.parse("11x160") == ModelSize(11, 160, 4, 448)
    assert str(ModelSize.parse("2x128x2x96")) == "2x128x2x96"
    for text in ("", "3", "2x", "2x0", "axb", "1x2x3"):
        with pytest.raises(ValueError, match="LAYERSxHIDDEN"):
            ModelSize.parse(text)


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
