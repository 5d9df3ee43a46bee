import pytest
import torch

from tests.engine.cases import CLASSES, MEMBERS, batches, cohort
from torchace.data import chunks
from torchace.engine.evaluate import DISPUTED, evaluate, logits_of
from torchace.functional import disagreement
from torchace.metrics import EnsembleMetrics


def example(members: int = MEMBERS, samples: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(members, samples, CLASSES, generator=generator)
    return logits, torch.randint(CLASSES, (samples,), generator=generator)


@pytest.mark.parametrize("size", [7, 40, 1000])
def test_chunks_do_not_matter(size: int) -> None:
    network, split = cohort([5, 6]), batches().split
    network.train()
    logits, target = logits_of(network, chunks(split, size, dtype=torch.float64))
    assert network.training
    assert len(logits) == 2
    assert target.equal(split.y)
    for r in range(2):
        torch.testing.assert_close(logits[r], network.ensemble(r)(split.x).detach(), rtol=0, atol=1e-13)
        assert not logits[r].requires_grad


def test_scores_are_the_metrics() -> None:
    logits, target = example()
    metrics = EnsembleMetrics(MEMBERS, CLASSES)
    metrics.update(logits, target)
    expected = {name: value.tolist() for name, value in metrics.compute().items()}
    assert evaluate(logits, target).metrics == expected


def test_the_disputed_samples_are_those_members_differ_on_most() -> None:
    logits, target = example()
    arrays = evaluate(logits, target).arrays
    shares = disagreement(logits, reduction="none")
    shown = shares[arrays["disputed_index"]]
    assert len(shown) == DISPUTED
    assert (shown.diff() <= 0).all()
    left = torch.ones(len(target), dtype=torch.bool)
    left[arrays["disputed_index"]] = False
    assert shares[left].max() <= shown.min()
    assert arrays["disputed_target"].equal(target[arrays["disputed_index"]])
    assert arrays["disputed_votes"].equal(logits.argmax(2)[:, arrays["disputed_index"]].T)
    torch.testing.assert_close(arrays["disputed_probs"], logits.softmax(2).mean(0)[arrays["disputed_index"]])


def test_arrays_add_up() -> None:
    logits, target = example()
    arrays = evaluate(logits, target).arrays
    assert arrays["reliability_count"].sum() == len(target)
    matrix = arrays["disagreement_matrix"]
    assert matrix.equal(matrix.T)
    assert matrix.diagonal().eq(0).all()
    pairs = MEMBERS * (MEMBERS - 1)
    assert float(matrix.sum()) / pairs == pytest.approx(float(disagreement(logits)), abs=1e-6)


@pytest.mark.parametrize(("channels", "shape"), [(1, (8, 8)), (3, (8, 8, 3))])
def test_images_are_as_people_see_them(channels: int, shape: tuple[int, ...]) -> None:
    logits, target = example()
    images = torch.randint(256, (len(target), channels, 8, 8), dtype=torch.uint8)
    arrays = evaluate(logits, target, images).arrays
    assert arrays["disputed_images"].shape == (DISPUTED, *shape)
    assert arrays["disputed_images"].is_contiguous()
    first = int(arrays["disputed_index"][0])
    assert arrays["disputed_images"][0].equal(images[first, 0] if channels == 1 else images[first].permute(1, 2, 0))


def test_one_member_disputes_nothing() -> None:
    logits, target = example(members=1)
    evaluation = evaluate(logits, target, torch.zeros(len(target), 1, 8, 8, dtype=torch.uint8))
    assert len(evaluation.arrays["disputed_index"]) == 0
    assert evaluation.arrays["disputed_images"].shape == (0, 8, 8)


def test_members_that_agree_dispute_nothing() -> None:
    logits, target = example()
    evaluation = evaluate(logits[:1].expand(MEMBERS, -1, -1), target)
    assert evaluation.metrics["disagreement"] == 0
