"""The support table of the README, printed from what the backends declare of themselves.

python -m specmla.cli.support
"""

from __future__ import annotations

from specmla.backends.base import Capabilities
from specmla.backends.select import BACKENDS, get_backend

HEADER = (
    "backend",
    "query lengths",
    "masks",
    "page sizes",
    "dtypes",
    "quantised formats",
    "latent + rope",
    "heads",
    "LSE",
    "graphs",
    "devices",
    "what it is",
)


def support_row(has: Capabilities) -> list[str]:
    """Give the declared capabilities of one backend, a cell a column of `HEADER`."""
    pages = "any" if has.page_size_multiple == 1 else f"multiples of {has.page_size_multiple}"
    return [
        has.name,
        has.query_len_support.value,
        ", ".join(sorted(m.value for m in has.masks)),
        pages,
        ", ".join(str(d).removeprefix("torch.") for d in has.dtypes),
        ", ".join(has.formats) or "none",
        f"{_some(has.ranks)} + {_some(has.rope_dims)}",
        _heads(has),
        "yes" if has.gives_lse else "no",
        has.graphs.value,
        ", ".join(_device(kind, has) for kind in has.device_types),
        has.summary,
    ]


def _some(sizes: tuple[int, ...] | None) -> str:
    return "any" if sizes is None else "/".join(map(str, sizes))


def _heads(has: Capabilities) -> str:
    most = "any" if has.max_heads is None else f"1 to {has.max_heads}"
    return most if has.padded_heads is None else f"{most}, computed as {has.padded_heads}"


def _device(kind: str, has: Capabilities) -> str:
    named = kind == "cuda" and has.architectures
    return f"{kind} ({', '.join(has.architectures)})" if named else kind


def support_table() -> str:
    """Give the table of all backends in Markdown."""
    rows = [support_row(get_backend(name).capabilities) for name in BACKENDS]
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(support_table())
