"""The examples with hardly any lessons: everything that they build, in seconds."""

from examples.calculator import Calculator
from examples.countdown import Countdown
from examples.drawings import Drawings
from examples.quickstart import QuickStart
from examples.search import Search
from examples.thinking import Thinking

_FEW = {"num_train": 60, "num_test": 20, "num_clean_steps": 2, "num_careless_steps": 1, "batch_size": 4}
TINY = {
    "quickstart": QuickStart(**_FEW),
    "quickstart_tools": Calculator(**_FEW),
    "quickstart_search": Search(**_FEW),
    "quickstart_countdown": Countdown(**_FEW),
    "quickstart_thinking": Thinking(**_FEW),
    "quickstart_vlm": Drawings(**_FEW),
}
