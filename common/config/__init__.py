"""Every setting, with its meaning under it. Both processes read the same YAML file.

    sections.py sampling.py rollouts.py algorithm.py training.py    the settings, section by section
    settings.py checks.py                                           all sections together; what they must agree on
    loading.py messages.py                                          reading a file; errors in words
    reference_page.py                                               docs/config.md

Key names follow TRL where TRL has one. `load` reads the file, applies `key=value` overrides, checks everything
once and reports all errors together, with file, line and "did you mean". Nothing here imports torch, so a typo
costs milliseconds, not the start of two processes.
"""

from common.config.algorithm import Algorithm, GroupParams
from common.config.checks import Config
from common.config.loading import load
from common.config.rollouts import Rollouts
from common.config.sampling import MAX_TOP_K, ROUNDING, TIES, Eval, Rewards, Sampler
from common.config.sections import (
    MAX_LORA_RANK,
    MAX_SOCKET_PATH,
    Channel,
    Data,
    Lora,
    Model,
    PromptTemplate,
    Reference,
    Run,
    Section,
    Weights,
)
from common.config.settings import world_size
from common.config.training import Critic, Trainer

__all__ = [
    "MAX_LORA_RANK",
    "MAX_SOCKET_PATH",
    "MAX_TOP_K",
    "ROUNDING",
    "TIES",
    "Algorithm",
    "Channel",
    "Config",
    "Critic",
    "Data",
    "Eval",
    "GroupParams",
    "Lora",
    "Model",
    "PromptTemplate",
    "Reference",
    "Rewards",
    "Rollouts",
    "Run",
    "Sampler",
    "Section",
    "Trainer",
    "Weights",
    "load",
    "world_size",
]
