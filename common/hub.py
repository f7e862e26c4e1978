"""Asks whether the hub answers, with the standard library alone: before anything is installed, too."""

import functools
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request

_ANSWERS_WITHIN_S = 5.0


def hub_address() -> str:
    """Returns the address of the hub, or of its mirror."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_error() -> Exception | None:
    """Returns the error of a request to the hub, or TimeoutError after five seconds; None if it answers."""
    found: list[Exception | None] = [TimeoutError("timed out")]

    def ask() -> None:
        try:
            request = urllib.request.Request(hub_address(), method="HEAD")
            urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S).close()
            found[:] = [None]
        except (OSError, ValueError) as error:
            found[:] = [error]

    asking = threading.Thread(target=ask, daemon=True)  # a timeout of urlopen would not end a search for the name
    asking.start()
    asking.join(_ANSWERS_WITHIN_S)
    return found[0]


@functools.cache
def work_offline_without_hub() -> None:
    """Sets HF_HUB_OFFLINE, for child processes too, if the hub does not answer, whose client would retry for long."""
    from huggingface_hub import constants

    error = None if constants.HF_HUB_OFFLINE else hub_error()
    reason = getattr(error, "reason", error)
    if error is None or isinstance(error, urllib.error.HTTPError) or isinstance(reason, ssl.SSLError):
        return  # after an SSL error, too: it answers, and its client has certificates of its own
    what = f"the hub {hub_address()} does not answer ({reason}): only what is in its cache is used"
    print(f"tandem: {what}", file=sys.stderr, flush=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
