"""The README's paragraph about quantised caches beside bfloat16, from one run on one device."""

from __future__ import annotations

from typing import Any

from specmla.bench.markdown import table


def format_figures(found: dict[str, Any]) -> list[str]:
    """Give the paragraph and its table; ratios are bfloat16's time over that of e4m3 rows."""
    rows = [r for r in found["rows"] if r["us"] is not None]
    times = {(r["batch"], r["provider"], r.get("cache_format")): r["us"] for r in rows}
    lines = []
    for batch in dict.fromkeys(r["batch"] for r in rows):
        plain, coded = times[batch, "hopper", None], times[batch, "hopper", "fp8"]
        slow = times[batch, "triton", "fp8"]
        numbers = f"{plain:.1f}", f"{coded:.1f}", f"{plain / coded:.2f}", f"{slow:.1f}"
        lines.append([f"`{batch}`", *numbers])
    env, heads = found["env"], rows[0]["heads"]
    worst = max(r["rel_err"] for r in rows if r.get("cache_format"))
    text = (
        f'**e4m3 rows on Hopper** (`cache_format("fp8", ...)`, 576 bytes a token), one '
        f"{env['gpu']['name']}, {env['date'][:10]}, {heads} heads, main kernel and merge, checked "
        f"against the dequantised cache in float64 first (relative error at most {worst:.1e}). "
        "Rows are attended 32 at a time, so that 64 rows (q 4) read the cache twice. Asked for: "
        "1.40 at q 1 and 2 of `32q..s8k`, 1.25 at q 4. "
        "`python -m specmla.bench verify --impl hopper triton --cache-format fp8 --batch ...`"
    )
    return [text, table(["batch, µs", "bfloat16", "`fp8`", "ratio", "`fp8` by `triton`"], lines)]
