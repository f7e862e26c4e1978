"""The exceptions that several modules know. Those that decide how a process ends have an exit code in exits.py.

Exceptions of one module alone are defined in that module: weights.BadWeights, rewards.RewardError.
"""

from common.redact import without_passwords


class _WithoutPasswords(Exception):
    """An error that people read: a password inside an address, such as that of a data set, is hidden in its text."""

    def __init__(self, text: str = ""):
        super().__init__(without_passwords(text))


class UserError(_WithoutPasswords):
    """An error that the user can fix. Its text has what happened, the value, and what to paste. Exit 2."""


class Retryable(_WithoutPasswords):
    """A failure with nothing wrong in the settings: a supervisor may start this process again. Exit 75."""


class PeerEnded(Exception):
    """The end of the other process, which sent BYE; this process ends with the exit code that BYE asks for."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code


class Interrupted(Exception):
    """A requested end in which the state is whole: what can be saved may be saved. Exit 130."""


class OutOfTime(Interrupted):
    """The end of trainer.max_hours, after what could be saved is saved. Exit 75: the run goes on when resumed."""


class WireError(Exception):
    """An error for a message that must not be used. `reason` is a short, countable name."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def with_type(error: BaseException) -> str:
    """Returns "ValueError: its text"."""
    return f"{type(error).__name__}: {error}"


def first_line(reason: object) -> str:
    """Returns the first line of an error's text, "" if it has none."""
    return next(iter(str(reason).splitlines()), "")


def require(is_valid: object, reason: str, detail: str = "") -> None:
    """Raises WireError unless a part of a message is valid."""
    if not is_valid:
        raise WireError(reason, detail)
