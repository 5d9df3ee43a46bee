"""Networks with token ids, several inputs and named inputs, trained as one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.training.small_trainings import CLASSES, MEMBERS, run_group, train_config, weights
from torchace.lab.data import Batches, Split
from torchace.lab.data.batches import BatchTransform
from torchace.lab.data.splits import as_arguments, map_inputs
from torchace.lab.training.loop import fit

WORDS, LENGTH, SAMPLES = 11, 5, 24


class Tagger(nn.Module):
    """Mean of the embeddings of unmasked tokens."""

    def __init__(self, takes_dict: bool = False) -> None:
        super().__init__()
        self.takes_dict = takes_dict
        self.embedding = nn.Embedding(WORDS, 4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, tokens: Any, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
        if self.takes_dict:
            tokens, mask = tokens["ids"], tokens["keep"]
        assert mask is not None
        kept = mask.unsqueeze(-1)
        return self.fc(scale * (self.embedding(tokens) * kept).sum(-2) / kept.sum(-2))


def taggers(seed: int, takes_dict: bool = False) -> list[Tagger]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [Tagger(takes_dict).double() for _ in range(MEMBERS)]


@pytest.mark.parametrize("kind", ["shared", "exchanged"])
@pytest.mark.parametrize("form", ["named", "dict", "tuple"])
def test_named_and_several_inputs_train_as_each_run_alone(form: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.7
    mask[:, 0] = True
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    takes_dict = form == "dict"
    x = {"ids": tokens, "keep": mask} if takes_dict else {"tokens": tokens, "mask": mask}
    if form == "tuple":
        x = (tokens, torch.full((SAMPLES, 1), 2.0, dtype=torch.float64), mask)
    split = Split(x, y)
    config = train_config(kind, 9, optimizer="sgd", learning_rate=0.5)
    together = run_group([taggers(3, takes_dict), taggers(4, takes_dict)])
    fit(together, Batches(split, 8, dtype=torch.float64), config, diversities=[0.0, 0.6], seeds=[3, 4])
    for r, (diversity, seed) in enumerate([(0.0, 3), (0.6, 4)]):
        alone = run_group([taggers(seed, takes_dict)])
        batches = Batches(split, 8, dtype=torch.float64)
        fit(alone, batches, config, diversities=[diversity], seeds=[seed])
        for name, value in weights(alone, 0).items():
            torch.testing.assert_close(weights(together, r)[name], value, rtol=0, atol=1e-12)  # float64, 9 steps
    if kind == "shared":  # λ=0: plain training of the first run's first member
        member = taggers(3, takes_dict)[0]
        optimizer = torch.optim.SGD(member.parameters(), lr=0.5, momentum=0.9)
        for step in range(9):
            inputs, labels = Batches(split, 8, seed=3, dtype=torch.float64).batch(*divmod(step, 3))
            optimizer.zero_grad()
            F.cross_entropy(member(*as_arguments(member, inputs)), labels).backward()
            optimizer.step()
        for name, value in member.state_dict().items():
            torch.testing.assert_close(together.ensemble(0)[0].state_dict()[name], value, rtol=0, atol=1e-12)


def test_named_inputs_follow_the_parameters_of_forward() -> None:
    ids, keep = torch.zeros(2, 3), torch.ones(2, 3)
    assert as_arguments(Tagger(), {"mask": keep, "tokens": ids}) == [ids, 2.0, keep]
    assert as_arguments(Tagger(), {"ids": ids, "keep": keep}) == [{"ids": ids, "keep": keep}]
    with pytest.raises(
        TypeError, match="Expected an input 'tokens' for the network's forward, but the data has 'mask'"
    ):
        as_arguments(Tagger(), {"mask": keep})


def jitter(x: Tensor, training: bool) -> Tensor:
    return x + torch.randn(x.shape, dtype=x.dtype) if training else x * 2


def test_a_transform_draws_by_seed_epoch_and_step_alone() -> None:
    split = Split(torch.arange(12.0).view(6, 2), torch.zeros(6, dtype=torch.int64))
    batches = Batches(split, 3, transform=BatchTransform(jitter))
    state = torch.get_rng_state()
    both, _ = batches.batch_many([5, 7], 1, 1)
    plain, _ = Batches(split, 3).batch_many([5, 7], 1, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(both, plain)
    alone, _ = Batches(split, 3, transform=BatchTransform(jitter)).batch_many([7], 1, 1)
    assert torch.equal(alone[0], both[1])
    assert not torch.equal(batches.batch_many([7], 0, 1)[0] - plain[1], alone - plain[1])
    assert torch.equal(BatchTransform(jitter)(split.x), split.x * 2)
    assert map_inputs(torch.Tensor.double, split.x).dtype == torch.float64


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda x: x + torch.rand(1),
            "The transform draws random numbers on test data; give it a parameter `training`",
        ),
        (lambda x: x[:1], r"return one entry for each sample of a batch, but got \(1, 2\)"),
        (lambda x: None, "return one entry for each sample of a batch, but got"),
    ],
)
def test_transforms_that_cannot_be_evaluated_are_refused(transform: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchTransform(transform)(torch.zeros(3, 2))
