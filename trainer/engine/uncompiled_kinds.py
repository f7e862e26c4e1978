"""An agreement between all ranks on which kinds of attention are no longer compiled.

A rank knows only which kinds failed to compile on its own GPU, with its own rows. Other ranks may
have a different GPU, and they have different rows.
"""

from collections.abc import Iterable

from model import compiled
from trainer.engine.ranks import Collectives

_agreed: set[str] = set()  # kinds that no rank compiles any longer


def share_uncompiled_kinds(collectives: Collectives, kinds: Iterable[str]) -> None:
    """Makes all ranks stop compiling a kind of attention if at least one rank cannot compile it.

    A kind is a text that lists the options of an attention call, but not its length
    (model/compiled.py). Every rank must call this function.
    kinds: kinds that this rank gives up now. Kinds that it has abandoned before are added to them.
    """
    kinds_here = {*kinds, *compiled.abandoned_kinds()}
    new_kinds = kinds_here - _agreed
    has_new_kinds = len(new_kinds) > 0
    if not collectives.any_rank(has_new_kinds):
        return

    # rank 0 joins the kinds of all ranks, one kind on each line, and sends them back
    texts = collectives.gather("\n".join(sorted(kinds_here)))
    joined = collectives.broadcast_text("\n".join(texts))
    kinds_of_all_ranks = {kind for kind in joined.splitlines() if kind}
    _agreed.update(kinds_of_all_ranks)
    compiled.abandon(kinds_of_all_ranks)
