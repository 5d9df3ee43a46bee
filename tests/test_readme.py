"""The README's code runs as it stands there."""

import re
from pathlib import Path

import torch

from torchace import SweepResult

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for block in blocks:
        exec(block, names)
    probs, epistemic = names["probs"], names["epistemic"]
    assert isinstance(probs, torch.Tensor)
    assert isinstance(epistemic, torch.Tensor)
    torch.testing.assert_close(probs.sum(1), torch.ones(128))
    assert (epistemic > 0).all()
    result = names["result"]
    assert isinstance(result, SweepResult)
    assert len(result.to_frame()) == 15  # five λ, three seeds
