"""Makes this process's torch one with a card that is not there, then runs a module of this folder on a request.

    python -m tests.support.pretended_card compiles LIBRARY '{"card": "8.6", "cells": [{…}, …]}'
    python -m tests.support.pretended_card executes LIBRARY '{"card": "8.6", "cases": [{…}, …]}'

"damage" in the request names a fault that model.attention gets.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from tests.support.pretended_card import CARDS, damages, start


def main(module: str, library: str, text: str) -> None:
    request = json.loads(text)
    start(Path(library), CARDS[request["card"]], executes=module == "executes")
    if damage := request.get("damage"):
        damages.import_damaged(damage)
    importlib.import_module(f"{__package__}.{module}").main(request)


main(*sys.argv[1:])
sys.stdout.flush()
os._exit(0)  # autograd's thread of the simulated device may still run, and Python's own end would abort the process
