"""The README's part about trees after the model, from `results/h200_trees.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmla.bench.environment import command_of, place_of
from specmla.bench.markdown import table


def tree_figures(found: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Give the paragraph: what deciding about trees takes by the rules in torch.

    Args:
        found: the results.
        others: those of other benchmarks by name; `h200_accept` may have timed the kernels.
    """
    env, sizes = found["env"], found["options"]
    timed = {row["shape"] for row in others.get("h200_accept", {"rows": []})["rows"]}
    fused = any("fused" in row["part"] for row in found["rows"])
    by = "by the rules in torch" + (" and by the fused kernels" if fused else "")
    late = ' The fused kernels (`acceptance="triton"`) have not been timed yet.'
    intro = (
        f"**Deciding about trees** of {sizes['nodes'] + 1} nodes, {sizes['requests']} requests, "
        f"{sizes['vocab']:,} ids, {sizes['dtype']}, {by}, one {place_of(env)}, "
        f"{env['date'][:10]}; beside the time of reading logits and q once at copy bandwidth. "
        f"`move` brings accepted rows to the front in {sizes['layers']} layers."
    )
    lines = [
        [row["part"], f"{row['us']:.0f}", f"{row['times_read_once']:.1f}"] for row in found["rows"]
    ]
    shown = table(["part", "µs", "times reading once"], lines)
    whole = intro + ("" if fused or "tree" in timed else late)
    return [f"{whole}\n\n{shown}\n\n{command_of(env)}"]
