import math

import pytest
import torch

from torchace.lab.training.config import TrainConfig, make_optimizer, set_learning_rates


def test_he_schedule() -> None:
    warmup = {"warmup_steps": 400, "warmup_learning_rate": 0.01}
    config = TrainConfig(64000, learning_rate=0.1, schedule="step", milestones=(32000, 48000), **warmup)
    expected = {0: 0.01, 399: 0.01, 400: 0.1, 31999: 0.1, 32000: 0.01, 47999: 0.01, 48000: 0.001, 63999: 0.001}
    assert {step: config.learning_rate_at(step) for step in expected} == pytest.approx(expected)


def test_cosine_falls_from_the_full_rate_to_almost_none() -> None:
    config = TrainConfig(steps=100, learning_rate=0.2, schedule="cosine", warmup_steps=20)
    assert config.learning_rate_at(20) == pytest.approx(0.2)
    assert config.learning_rate_at(60) == pytest.approx(0.1)
    assert config.learning_rate_at(99) == pytest.approx(0.1 * (1 + math.cos(math.pi * 79 / 80)))
    rates = [config.learning_rate_at(step) for step in range(20, 100)]
    assert rates == sorted(rates, reverse=True)


def test_linear_warm_up_reaches_the_rate_with_its_last_step() -> None:
    config = TrainConfig(steps=10, learning_rate=0.4, warmup_steps=4)
    assert [config.learning_rate_at(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert {TrainConfig(steps=5, learning_rate=0.3).learning_rate_at(step) for step in range(5)} == {0.3}


def test_diversity_warm_up() -> None:
    config = TrainConfig(steps=10, diversity_warmup_steps=4)
    assert [config.diversity_share_at(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert TrainConfig(steps=10).diversity_share_at(0) == 1.0


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizer_takes_its_rate_from_the_schedule(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = make_optimizer(TrainConfig(steps=1, optimizer=name, learning_rate=0.5, weight_decay=0.1), [parameter])
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    set_learning_rates(optimizer, [TrainConfig(steps=1, learning_rate=0.25)], 0)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_learning_rate_in_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=rate, fused=True)
    set_learning_rates(optimizer, [TrainConfig(steps=1, learning_rate=0.25)], 0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_weights_are_float64_only_on_request() -> None:
    found = [TrainConfig(steps=1, precision=p).dtype for p in ("float64", "float32", "bf16")]
    assert found == [torch.float64, torch.float32, torch.float32]
