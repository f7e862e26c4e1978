"""An agreement between all ranks on which kinds of attention are no longer compiled.

A rank knows only what failed to compile on its own GPU, for the rows that it had. GPUs and rows of
ranks may differ.
"""

from collections.abc import Iterable

from model import compiled
from model.compiled import abandon
from trainer.engine.ranks import Collectives

_agreed: set[str] = set()


def share_uncompiled_kinds(collectives: Collectives, kinds: Iterable[str]) -> None:
    """Stops compiling, on every rank, each kind of attention that any rank gives up.

    A kind is a text that describes an attention by its options, but not by its length, as in
    model.compiled. A rank gives up its `kinds` and those that it has abandoned before. Every rank
    calls this function.
    """
    kinds_here = {*kinds, *compiled.abandoned_kinds()}
    is_news = not kinds_here <= _agreed
    if not collectives.any_rank(is_news):
        return
    texts = collectives.gather("\n".join(sorted(kinds_here)))
    text = collectives.broadcast_text("\n".join(texts))
    kinds_of_all_ranks = {kind for kind in text.splitlines() if kind}
    _agreed.update(kinds_of_all_ranks)
    abandon(kinds_of_all_ranks)
