"""A drafter of your own: any object with these four members, checked and compared."""

import torch

from specmla import DraftProposal
from specmla.bench.compare import cases_of, compare
from specmla.bench.compare_run import Contender, RunSettings
from specmla.cli.checkpoint import load_shipped_pair
from specmla.testing import check_drafter


class RepeatDrafter:
    """Guesses that the text goes on as after the last time its last token occurred."""

    vocab_size = 4096  # the target's

    def propose(self, requests):
        """Give -1 where there is no guess; nothing is drawn, so there are no `probs`."""
        rows = torch.full((len(requests), max(r.num_drafts for r in requests)), -1)
        for row, r in zip(rows, requests, strict=True):
            places = [i for i, token in enumerate(r.tokens[:-1]) if token == r.tokens[-1]]
            found = r.tokens[places[-1] + 1 :][: r.num_drafts] if places else []
            row[: len(found)] = torch.tensor(list(found), dtype=torch.int64)
        names, counts = tuple(r.request_id for r in requests), (rows >= 0).sum(1).tolist()
        return DraftProposal(names, tuple(counts), rows)

    def observe(self, results, hidden=None):
        """Nothing is learnt."""

    def reset(self, request_id):
        """Nothing is kept."""


pair = load_shipped_pair(torch.device("cpu"))
mine = Contender("mine", lambda step: RepeatDrafter())
check_drafter(mine.make, pair.target, num_samples=20, report=print).raise_if_failed()
prompts = [pair.tokenizer.encode(text).ids for text in pair.prompts[:2]]
cases = cases_of([mine], ["token_level"], [0.0, 1.0])
for row in compare(pair.target, prompts, cases, RunSettings(max_tokens=24))["rows"]:
    print(f"{row['rule']}, T = {row['temperature']:g}: {row['tokens_per_step']:.2f} tokens a step")
