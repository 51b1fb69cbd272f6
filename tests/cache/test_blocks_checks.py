"""What page accounting refuses, and what its integrity check sees."""

from __future__ import annotations

import ast
from array import array
from pathlib import Path

import pytest

import specmla.cache.blocks as blocks
from specmla.cache import BlockManager
from specmla.errors import ArgumentError, ArgumentTypeError, IntegrityError, SpecMLAError


def grow(manager: BlockManager, name: str, tokens: list[int]) -> None:
    """Reserve and commit everything of `tokens` that `name` doesn't hold yet."""
    manager.reserve({name: len(tokens) - manager.length(name)})
    manager.commit(name, len(tokens), tokens)
    manager.check_integrity()


def cached(page_size: int, tokens: list[int], num_pages: int = 64) -> BlockManager:
    manager = BlockManager(num_pages, page_size)
    manager.add("a", tokens)
    grow(manager, "a", tokens)
    return manager


def test_refusals_change_nothing() -> None:
    manager = cached(4, list(range(6)))
    manager.reserve({"a": 3})
    before = (list(manager.block_ids("a")), manager.length("a"), manager.num_free)
    tokens = list(range(12))
    calls = [
        (lambda: manager.add("a", [1]), "'a' is in use"),
        (lambda: manager.add("b", [1, -1]), "holds -1, accepted are ids >= 0"),
        (lambda: manager.length("x"), r"'x' is unknown, accepted are \['a'\]"),
        (lambda: manager.block_ids("x"), "'x' is unknown"),
        (lambda: manager.free("x"), "'x' is unknown"),
        (lambda: manager.fork("x", "y"), "'x' is unknown"),
        (lambda: manager.fork("a", "a"), "'a' is in use"),
        (lambda: manager.reserve({"a": -1, "x": 3, "y": 0}), "'a'.* -1.*'x' is unknown.*'y' is"),
        (lambda: manager.roll_back("a", 7), r"length is 7, accepted are 0 \.\. 6"),
        (lambda: manager.roll_back("a", -1), "length is -1"),
        (lambda: manager.commit("a", 5, tokens), r"length is 5, accepted are 6 \(held\) \.\. 9"),
        (lambda: manager.commit("a", 10, tokens), "length is 10"),
        (lambda: manager.commit("a", 8, tokens[:7]), "tokens has 7 entries"),
        (lambda: manager.commit("a", 8, tokens[2:]), r"tokens\[5\] is 7, the sequence holds 5"),
        (lambda: manager.commit("a", 8, [*range(6), 6, -1]), "holds -1"),
    ]
    for call, message in calls:
        with pytest.raises(ArgumentError, match=message):
            call()
        assert before == (list(manager.block_ids("a")), manager.length("a"), manager.num_free)
        assert "b" not in manager
        manager.check_integrity()
    for wrong in ([1.5], ["a"], [2**63], None):
        with pytest.raises(ArgumentTypeError):
            manager.add("b", wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        manager.commit("a", 8, [*range(6), 6, 0.5])  # type: ignore[list-item]
    assert manager.length("a") == 6


def test_construction_lists_every_problem() -> None:
    with pytest.raises(ArgumentError) as error:
        BlockManager(0, 0, lookahead=-1)
    for part in ("num_pages is 0", "page_size is 0", "lookahead is -1"):
        assert part in str(error.value)


def test_tokens_of_any_integer_sequence() -> None:
    manager = BlockManager(8, 2)
    manager.add(("tuple", 1), (1, 2, 3))
    manager.reserve({("tuple", 1): 3})
    manager.commit(("tuple", 1), 3, array("i", [1, 2, 3]))
    assert manager.match(range(1, 4)) == 2
    assert manager.match([2**62, 1]) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("manager._pool.refs[manager.block_ids('a')[0]] += 1", "reference counts"),
        ("manager._pool._free.append(manager._pool._free[0])", "a page is free twice"),
        ("manager._pool._free.append(manager.block_ids('a')[0])", "free and owned"),
        ("manager._pool._free.pop()", "are not 64"),
        ("manager._sequences['a'].blocks.pop()", "don't hold 11 tokens"),
        ("manager._sequences['a'].blocks.append(200)", "outside the pool"),
        ("manager._sequences['a'].tokens.__setitem__(1, 77)", "published with other tokens"),
        ("manager._sequences['a'].tokens.__setitem__(1, 77)", "the key of page"),
        ("manager._sequences['a'].keys.pop()", "1 keys are held, 2 are due"),
        ("manager._index.publish(manager.block_ids('a')[2], b'', b'x')", "may be written"),
        (
            "manager._sequences['a'].blocks.__setitem__(2, manager.block_ids('a')[0])",
            "a page occurs twice",
        ),
        (
            "manager._index._published.__setitem__(manager.block_ids('a')[0],"
            " manager._index._published[manager.block_ids('a')[0]]._replace(content=b'x'))",
            "its tokens don't have",
        ),
        ("manager._index._page_of.popitem()", "1 keys lead to 2 published pages"),
    ],
)
def test_check_integrity_sees(damage: str, message: str) -> None:
    manager = cached(4, list(range(11)))
    manager.reserve({"a": 1})
    manager.check_integrity()
    exec(damage, {"manager": manager})
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity()
    with pytest.raises(SpecMLAError):
        manager.check_integrity()


def test_the_host_part_imports_no_torch() -> None:
    """Page accounting is plain Python; the package's __init__ loads the device part beside it."""
    folder = Path(str(blocks.__file__)).parent
    for name in ("blocks", "pages", "prefix", "sequence"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        for node in ast.walk(tree):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(str(m).split(".")[0] in ("torch", "triton", "numpy") for m in modules)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_are_one_token_each(kind):
    manager = BlockManager(4, 4)
    manager.add("a", kind(range(9)))
    manager.reserve({"a": 9})
    manager.commit("a", 9, kind(range(9)))
    assert manager.length("a") == 9
    assert manager.match(list(range(9))) == manager.match(kind(range(9))) == 8
