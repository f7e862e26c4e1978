"""The cases of the tables: all pairs of card, head size, heads per key head, dtype, options, length and layer."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

FACTORS: dict[str, tuple[Any, ...]] = {
    "card": ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"),
    "size": (64, 80, 96, 128, 192, 256),
    "heads_per_key_head": (1, 2, 4, 6, 7, 8),
    "dtype": ("bfloat16", "float32"),
    "kind": ("full", "window", "cap", "sinks"),
    "length": ("short", "long"),
    "has_forks": (False, True),
    "layer": ("attention alone", "layer", "layer with LoRA"),
}


@dataclass(frozen=True)
class Cell:
    """A case."""

    card: str  # compute capability
    size: int  # of a head
    heads_per_key_head: int
    dtype: str
    kind: str
    length: str
    has_forks: bool
    layer: str
    value_size: int | None = None  # of a head's values, where it is another than that of its keys

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, name)) for name in FACTORS)


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(cell: dict[str, Any]) -> Iterator[Pair]:
    """Yields what each two factors of a cell are."""
    return itertools.combinations(sorted(cell.items(), key=lambda item: item[0]), 2)


def covering_cells() -> list[Cell]:
    """Returns cells of which each two values of two factors are together in at least one, always the same ones."""
    missing = {pair for values in itertools.product(*FACTORS.values()) for pair in _pairs_of(values)}
    draw = random.Random(0)
    found = []
    while missing:
        candidates = [_candidate(draw, missing) for _ in range(30)]
        best = max(candidates, key=lambda cell: len(missing.intersection(pairs(cell))))
        missing.difference_update(pairs(best))
        found.append(Cell(**best))
    return found


def _pairs_of(values: tuple[Any, ...]) -> Iterator[Pair]:
    return pairs(dict(zip(FACTORS, values, strict=True)))


def _candidate(draw: random.Random, missing: set[Pair]) -> dict[str, Any]:
    """Returns a cell with one of the missing pairs, whose other values are each the best of those left."""
    cell = dict(draw.choice(sorted(missing, key=str)))
    others = [name for name in FACTORS if name not in cell]
    draw.shuffle(others)
    for name in others:
        values = list(FACTORS[name])
        draw.shuffle(values)
        cell[name] = max(values, key=lambda value: len(missing.intersection(pairs(cell | {name: value}))))
    return cell


def cells_of_default_tier() -> list[Cell]:
    """Returns the twelve cells that are compiled in each run of the tests.

    On two cards with 99 KiB of shared memory for a block, an A100 and an H100 the heads that need most of it, and
    short rows of grouped heads, for which torch would choose another kernel.
    """
    plain = {"has_forks": False, "layer": "attention alone"}
    given: list[dict[str, Any]] = [
        {"card": "8.0", "size": 64, "heads_per_key_head": 7, "dtype": "bfloat16", "kind": "full", "length": "long"},
        {"card": "8.6", "size": 192, "heads_per_key_head": 2, "dtype": "float32", "kind": "full", "length": "long"},
        {"card": "8.6", "size": 256, "heads_per_key_head": 2, "dtype": "bfloat16", "kind": "cap", "length": "long"},
        {"card": "8.6", "size": 160, "heads_per_key_head": 6, "dtype": "bfloat16", "kind": "full", "length": "long"},
        {"card": "12.0", "size": 256, "heads_per_key_head": 1, "dtype": "bfloat16", "kind": "full", "length": "short"},
        {"card": "12.0", "size": 192, "heads_per_key_head": 4, "dtype": "bfloat16", "kind": "window", "length": "long",
         "value_size": 128},
        {"card": "8.0", "size": 256, "heads_per_key_head": 8, "dtype": "bfloat16", "kind": "sinks", "length": "long"},
        {"card": "9.0", "size": 64, "heads_per_key_head": 4, "dtype": "bfloat16", "kind": "full", "length": "short"},
        {"card": "9.0", "size": 64, "heads_per_key_head": 8, "dtype": "bfloat16", "kind": "sinks", "length": "short"},
        {"card": "9.0", "size": 128, "heads_per_key_head": 7, "dtype": "float32", "kind": "full", "length": "long"},
        {"card": "9.0", "size": 64, "heads_per_key_head": 2, "dtype": "bfloat16", "kind": "window", "length": "long",
         "layer": "layer with LoRA"},
        {"card": "9.0", "size": 128, "heads_per_key_head": 2, "dtype": "bfloat16", "kind": "full", "length": "short"},
    ]  # fmt: skip
    return [Cell(**(plain | values)) for values in given]


def by_card(cells: list[Cell]) -> dict[str, list[Cell]]:
    """Returns the cells of each card: a process pretends one."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.card, []).append(cell)
    return found


def request(card: str, cells: list[Cell]) -> dict[str, Any]:
    """Returns what `compiles` is asked for."""
    return {"card": card, "cells": [asdict(cell) for cell in cells]}
