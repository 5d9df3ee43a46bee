import numpy as np
import pytest
import sklearn.metrics
import torch

from tests.lab.training.small_trainings import CLASSES, MEMBERS, batches, make_group
from torchace.functional import disagreement
from torchace.lab.data import chunks
from torchace.lab.training.evaluate import MAX_CONTESTED, MAX_POINTS, evaluate, evaluate_regression, predict_logits
from torchace.metrics import EnsembleMetrics


def example(members: int = MEMBERS, samples: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(members, samples, CLASSES, generator=generator)
    return logits, torch.randint(CLASSES, (samples,), generator=generator)


@pytest.mark.parametrize("size", [7, 40, 1000])
def test_results_do_not_depend_on_chunks(size: int) -> None:
    network, split = make_group([5, 6]), batches().split
    network.train()
    logits, target = predict_logits(network, chunks(split, size, dtype=torch.float64))
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


@pytest.mark.parametrize("size", [1, 7, 64])
def test_scores_do_not_depend_on_chunks(size: int) -> None:
    logits, target = example()
    logits[:, 50:60] = logits[:, 40:50]  # equal cases keep their order over chunks, too
    whole, found = evaluate(logits, target), evaluate(logits.split(size, 1), target)
    for name, value in whole.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5), name  # float32, sums in another order
    assert found.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        torch.testing.assert_close(found.arrays[name], array, rtol=1e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_contested_samples_have_the_largest_disagreement() -> None:
    logits, target = example()
    arrays = evaluate(logits, target).arrays
    shares = disagreement(logits, reduction="none")
    shown = shares[arrays["disputed_index"]]
    assert len(shown) == MAX_CONTESTED
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
    assert arrays["reliability_correct"].sum() == len(target) - arrays["sample_error"].sum()


@pytest.mark.parametrize(("channels", "shape"), [(1, (8, 8)), (3, (8, 8, 3))])
def test_images_have_channels_last_and_no_single_channel(channels: int, shape: tuple[int, ...]) -> None:
    logits, target = example()
    images = torch.randint(256, (len(target), channels, 8, 8), dtype=torch.uint8)
    arrays = evaluate(logits, target, images).arrays
    assert arrays["disputed_images"].shape == (MAX_CONTESTED, *shape)
    assert arrays["disputed_images"].is_contiguous()
    first = int(arrays["disputed_index"][0])
    assert arrays["disputed_images"][0].equal(images[first, 0] if channels == 1 else images[first].permute(1, 2, 0))


def test_one_member_has_no_contested_cases() -> None:
    logits, target = example(members=1)
    evaluation = evaluate(logits, target, torch.zeros(len(target), 1, 8, 8, dtype=torch.uint8))
    assert len(evaluation.arrays["disputed_index"]) == 0
    assert evaluation.arrays["disputed_images"].shape == (0, 8, 8)


def test_members_that_agree_have_no_contested_cases() -> None:
    logits, target = example()
    evaluation = evaluate(logits[:1].expand(MEMBERS, -1, -1), target)
    assert evaluation.metrics["disagreement"] == 0


# -- regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "samples", "scale"), [(1, 50, 1.0), (4, 200, 1e6), (3, 1, 1.0), (5, 6000, 1e-6)])
def test_scores_of_a_regression_are_those_of_scikit_learn(members: int, samples: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(samples)
    target = scale * (5 + torch.randn(samples, generator=generator, dtype=torch.float64))
    noise = torch.randn(members, samples, generator=generator, dtype=torch.float64)
    predictions = target + 0.3 * scale * (noise + torch.linspace(0, 1, samples))
    found = evaluate_regression(predictions, target)
    given, truth = predictions.numpy(), target.numpy()
    mean = given.mean(0)
    expected = {
        "mse": sklearn.metrics.mean_squared_error(truth, mean),
        "rmse": sklearn.metrics.root_mean_squared_error(truth, mean),
        "mae": sklearn.metrics.mean_absolute_error(truth, mean),
        "r2": sklearn.metrics.r2_score(truth, mean) if samples > 1 else np.nan,
        "member_mse": np.mean([sklearn.metrics.mean_squared_error(truth, member) for member in given]),
        "spread": given.std(0).mean(),
        "ambiguity": given.var(0).mean(),
    }
    scores = dict(found.metrics)
    own = scores.pop("members")
    assert scores.keys() == expected.keys()
    for name, value in expected.items():  # float64: the same sums in another order
        assert scores[name] == pytest.approx(value, rel=1e-10, abs=1e-15 * scale, nan_ok=True), name
    assert own == pytest.approx([sklearn.metrics.mean_squared_error(truth, member) for member in given], rel=1e-12)
    # the decomposition: what the ensemble gains over its members is how much they differ
    assert scores["member_mse"] - scores["mse"] == pytest.approx(scores["ambiguity"], rel=1e-9, abs=1e-15 * scale)


def test_arrays_of_a_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(MAX_POINTS + 10, generator=generator, dtype=torch.float64)
    predictions = target + torch.randn(3, MAX_POINTS + 10, generator=generator, dtype=torch.float64)
    arrays = evaluate_regression(predictions, target).arrays
    shapes = dict.fromkeys(("predicted", "observed", "spread"), (MAX_POINTS,))
    assert {name: tuple(value.shape) for name, value in arrays.items()} == shapes
    assert arrays["predicted"].equal(predictions.mean(0)[:MAX_POINTS])
    assert arrays["observed"].equal(target[:MAX_POINTS])


def test_a_regression_of_half_precision_is_scored_in_double() -> None:
    predictions, target = torch.full((2, 4), 3e5).bfloat16(), torch.zeros(4).bfloat16()
    assert evaluate_regression(predictions, target).metrics["mse"] == predictions[0, 0].double().item() ** 2


def test_a_constant_target_has_no_r2() -> None:
    metrics = evaluate_regression(torch.ones(2, 3), torch.zeros(3)).metrics
    assert np.isnan(metrics["r2"])
    assert (metrics["mse"], metrics["spread"], metrics["ambiguity"]) == (1, 0, 0)
