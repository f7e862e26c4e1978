"""Faults in the GPU's code of model/attention.py: tests on a pretended card must find each of them."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

MODULE = "model.attention"


@dataclass(frozen=True)
class Damage:
    """A place in the source of model/attention.py, and what makes it wrong."""

    right: str
    wrong: str


# found when the kernels are compiled
COMPILED = {
    "short rows take torch's decoding kernel": Damage('{"BACKEND": "TRITON"}', "{}"),
    "large heads take torch's own blocks": Damage("if 64 * token_bytes <= available:", "if True:"),
}
# found by the values and the gradients of what is executed
EXECUTED = {
    "a wrong bound of the mask": Damage("(first[i] < end[j])", "(first[i] <= end[j])"),
    "a lost scale": Damage("capped, mask, scale, gqa,", "capped, mask, None, gqa,"),
    "a swapped base of the log-sum-exp": Damage("found.lse - sinks[:, None]", "found.lse * 1.4427 - sinks[:, None]"),
    "a missing gradient of the sinks": Damage("found.lse - sinks[:, None]", "found.lse - sinks.detach()[:, None]"),
    "one key too many in a window": Damage("(depth[i] - depth[j] < window)", "(depth[i] - depth[j] <= window)"),
}
DAMAGES = COMPILED | EXECUTED


def import_damaged(name: str) -> None:
    """Imports model.attention with a damage. Call it before anything else imports it."""
    assert MODULE not in sys.modules, f"{MODULE} is imported already"
    damage = DAMAGES[name]
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(damage.right) == 1, f"{damage.right!r} is not in {MODULE} once: write this damage anew"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(source.replace(damage.right, damage.wrong), spec.origin, "exec"), vars(module))
    vars(sys.modules["model"])["attention"] = module
