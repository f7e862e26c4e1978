"""The real engine with adapters of a model that sees: each version has the trainer's log-probs of an image."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from model.packing import PackedRow
from model.vision import with_vision
from sampler.engine.reload import reload
from tests.engine.test_vision_engine import Eye, images_for
from tests.support.plain_policy import AdaptedPolicy
from trainer.engine.exported import exported

pytestmark = pytest.mark.timeout(300)


class SeeingPolicy(AdaptedPolicy):
    """Its canary shows an image, and it publishes as lora.sync says."""

    def __init__(self, eye: Eye):
        super().__init__(eye.config)
        self.config = eye.config
        self.layout: Any = eye.layout
        self.tensors = exported(self.model, eye.config.lora)
        if not eye.config.lora.publishes_adapters:
            self.published_settings = None

    def score(self, row: PackedRow, temperature: float) -> Tensor:
        found: Tensor = super().score(with_vision(row, self.layout), temperature)
        return found


@pytest.fixture(scope="module", params=["adapter", "merged"])
def eye(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eye:
    lora = {"r": 4, "alpha": 12, "sync": request.param}
    return Eye("qwen2_5_vl", tmp_path_factory.mktemp(request.param), lora=lora)


def test_every_version_of_adapters_has_the_trainers_log_probs_of_images(eye: Eye, tmp_path: Path) -> None:
    first, second, other = images_for(eye.vision)
    policy = SeeingPolicy(eye)
    eye.model = policy.model
    for number in (1, 2):
        policy.disturb(number)
        reloaded = reload(eye.engine, policy.publish(tmp_path / "weights", number), eye.config)
        assert reloaded["sync/canary_max_diff"] < 1e-5
        assert eye.distance((first,), (first, second), ()) < 1e-5
        assert eye.distance((first,), given=[(other,)]) > 0.5  # the control
