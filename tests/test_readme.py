"""The README's code runs as it stands there."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(blocks[0], names)
    probs, epistemic = names["probs"], names["epistemic"]
    assert isinstance(probs, torch.Tensor)
    assert isinstance(epistemic, torch.Tensor)
    torch.testing.assert_close(probs.sum(1), torch.ones(128))
    assert (epistemic > 0).all()
