"""One decision of all ranks on the kinds of attention that are no longer compiled.

A rank knows only what did not compile on its own GPU, for the rows that it had. GPUs and rows of ranks may differ.
"""

from collections.abc import Iterable

from model import compiled
from model.compiled import abandon
from trainer.engine.ranks import Exchange

_agreed: set[str] = set()


def agree_on_kinds(exchange: Exchange, kinds: Iterable[str]) -> None:
    """Abandons on every rank the kinds that one of them gives, or has abandoned. Every rank calls it."""
    kinds_here = {*kinds, *compiled.abandoned_kinds()}
    if not exchange.any_rank(not kinds_here <= _agreed):
        return
    texts = exchange.gather("\n".join(sorted(kinds_here)))
    kinds_of_all_ranks = exchange.broadcast_text("\n".join(texts))
    agreed = set(filter(None, kinds_of_all_ranks.splitlines()))
    _agreed.update(agreed)
    abandon(agreed)
