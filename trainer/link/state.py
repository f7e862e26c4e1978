"""What the training loop and the socket's thread share."""

from __future__ import annotations

import collections
import threading

from common.weights import Published
from trainer.link.evaluation import Evaluation
from trainer.link.ledger import Ledger
from trainer.link.peers import Peer, Reports


class SharedState:
    """Whoever uses it holds `changed`. Without it the loop may read `peers`, and the thread alone counts."""

    def __init__(self, ledger: Ledger):
        self.changed = threading.Condition()
        self.ledger = ledger
        self.published: Published | None = None  # nobody is credited before the first version
        self.progress = 0  # of the training loop; grows with every change that samplers must hear of
        self.evaluation: Evaluation | None = None
        self.peers: dict[str, Peer] = {}  # by sampler id; replaced, never changed in size
        self.reports = Reports()
        self.counters: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None  # raised by the loop's next wait
