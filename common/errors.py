"""The exceptions that several modules know. Those that decide how a process ends have an exit code in common/exits.py.

Errors of one module alone stand there: weights.BadWeights, rewards.RewardError.
"""

from __future__ import annotations

from common.redact import without_passwords


class _WithoutPasswords(Exception):
    """An error that people read: a password inside an address, such as that of a data set, is hidden in its text."""

    def __init__(self, text: str = ""):
        super().__init__(without_passwords(text))


class UserError(_WithoutPasswords):
    """The user can fix this: what happened, the value, and what to paste. The process exits 2."""


class Retryable(_WithoutPasswords):
    """Nothing is wrong with the settings: a supervisor may start this process again. Exit 75."""


class PeerEnded(Exception):
    """The other process said goodbye; this one ends with the exit code it asked for."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code


class Interrupted(Exception):
    """Somebody asked for the end and the state is whole: what can be saved may be saved. Exit 130."""


class OutOfTime(Interrupted):
    """trainer.max_hours is over, and what could be saved is saved. Exit 75: the run goes on when it is resumed."""


class WireError(Exception):
    """A message that must not be used. `reason` is a short, countable name."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
