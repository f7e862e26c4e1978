"""The settings of a run, each with its meaning under it. Both processes read the same YAML file.

    sections.py data.py sampling.py algorithm.py training.py    the settings, section by section
    settings.py checks.py                               all sections together; what they must agree on
    loading.py                                          reading a file; errors in words
    unknown_keys.py other_frameworks.yaml               what an unknown key was meant to be
    reference_page.py                                   docs/config.md

Key names follow TRL where TRL has one. `load` reads the file, applies `key=value` overrides, checks everything
once and reports all errors together, with file, line and "did you mean". No module here imports torch, so a typo
costs milliseconds, not the start of two processes.
"""

# ruff: noqa: F401 - the names that other packages import from here
from common.config.algorithm import Algorithm, GroupParams
from common.config.checks import Config
from common.config.data import Data
from common.config.loading import load
from common.config.sampling import MAX_ENVIRONMENTS, MAX_REWARD_WORKERS, ROUNDING, TIES, Eval, Rewards, Rollouts
from common.config.sections import MAX_LORA_RANK, MAX_SOCKET_PATH, Lora, Model, PromptTemplate, ReferenceSettings
from common.config.settings import world_size
from common.config.training import CriticSettings
