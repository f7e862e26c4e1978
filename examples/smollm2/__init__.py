"""What configs/smollm2_*.yaml start from: a pretrained model out of a wheel, and word problems in plain language."""
