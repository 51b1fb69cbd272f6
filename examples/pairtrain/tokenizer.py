"""The byte-level BPE shared by target and draft, and the corpus as one array of its ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
ENCODE_BATCH = 2048  # files handed to the tokenizer's threads at once


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_bytes: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` on the first `max_bytes` of `texts`.

    Every byte is in the vocabulary, so there is no unknown token; id 0 ends a file.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(texts, max_bytes), trainer)
    return tokenizer


def _first_bytes(texts: Sequence[str], max_bytes: int) -> Iterator[str]:
    size = 0
    for text in texts:
        if size >= max_bytes:
            return
        size += len(text)
        yield text


def encode_files(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: type[np.signedinteger[Any]] = np.int16
) -> NDArray[np.signedinteger[Any]]:
    """Encode all `texts` into one array [n], an end-of-text id after each."""
    parts: list[NDArray[np.signedinteger[Any]]] = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + ENCODE_BATCH]):
            parts.append(np.array([*encoding.ids, END_OF_TEXT_ID], dtype=dtype))
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
