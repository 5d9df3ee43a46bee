"""Training on several ranks equals training in one process, and no rank waits forever."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.training import small_trainings
from tests.lab.training.small_trainings import BATCH, CLASSES, FEATURES, assert_same, run_group
from tests.support.processes import counting, team
from torchace.lab.data import Batches, Split
from torchace.lab.training.checkpoint import Checkpoints, gather_network, shard_network, shard_state
from torchace.lab.training.config import TrainConfig, make_optimizer
from torchace.lab.training.distributed import (
    RankLostError,
    Ranks,
    check_same,
    detect_lost_rank,
    parse_layout,
    should_report,
)
from torchace.lab.training.evaluate import ValidationSet, evaluate, predict_logits
from torchace.lab.training.loop import CheckpointPolicy, FitResult, Interrupted, fit
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.step import TrainStep
from torchace.models import mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule

pytestmark = pytest.mark.extended

EXACT = 1e-12  # float64: sums over members and samples in another order
LAMBDAS, SEEDS = [0.0, 0.6], [3, 4]


# -- training ---------------------------------------------------------------------------------------------------------


def make_network(kind: str, hidden: int = 5, count: int = 3) -> RunGroup:
    """Two runs of three members, or more."""
    if kind == "separate":
        return run_group([_members(seed, hidden, count=count) for seed in SEEDS])
    if kind == "dropout":
        return run_group([_members(seed, hidden, dropout=0.5) for seed in SEEDS])
    if kind == "norm":
        return run_group([[_with_norm(seed, k) for k in range(3)] for seed in SEEDS])
    return RunGroup([_with_trunk(kind, seed, hidden) for seed in SEEDS])


def _with_trunk(kind: str, seed: int, hidden: int) -> EnsembleModule:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        trunk = mlp(FEATURES, hidden, None)
        if kind == "smoc":
            return SMOC(trunk, hidden, CLASSES, 3).double()
        return Ensemble([mlp(hidden, 4, CLASSES) for _ in range(3)], trunk).double()


def _members(seed: int, hidden: int = 5, dropout: float = 0.0, count: int = 3) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [mlp(FEATURES, hidden, CLASSES, dropout=dropout).double() for _ in range(count)]


def _with_norm(seed: int, k: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(10 * seed + k)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES)).double()


def make_batches(size: int, task: str, weighted: bool) -> Batches:
    """40 samples; weights in [0, 3), some of them 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (40,), generator=generator)
    weight = torch.randint(4, (40,), generator=generator) * torch.rand(40, generator=generator, dtype=torch.float64)
    target = y if task == "classification" else torch.randn(40, CLASSES, generator=generator, dtype=torch.float64)
    return Batches(Split(x, target, weight if weighted else None), size, dtype=torch.float64)


def make_train_config(case: dict[str, Any]) -> TrainConfig:
    names = ("task", "batches", "optimizer", "steps")
    return TrainConfig(
        **{"steps": 20, "learning_rate": 0.02, "precision": "float64"} | {n: case[n] for n in names if n in case}
    )


def train(case: dict[str, Any], layout: str | None, folder: str | None = None, backend: str | None = None) -> Any:
    """A training in one process, or this rank's part of it; what it left behind, on the first rank."""
    whole = make_network(case.get("kind", "separate"), case.get("hidden", 5), case.get("count", 3))
    network = whole if layout is None else shard_network(whole, Ranks(layout, backend=backend))
    batches = make_batches(case.get("size", BATCH), case.get("task", "classification"), case.get("weighted", False))
    held_out = None
    if "patience" in case:
        x, y = batches.split.x[:13] * 0.9, batches.split.y[:13].roll(1, 0)
        held_out = ValidationSet(Split(x, y), case["patience"])
    checkpoint_policy = None
    if folder is not None:
        checkpoint_policy = CheckpointPolicy(
            Checkpoints(Path(folder)), every_steps=case.get("every"), every_seconds=None
        )
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        rank = 0 if layout is None else dist.get_rank()
        return case.get("stop", {}).get(rank, 10**9) < len(asked)

    interrupted, fitted = False, FitResult()
    told: list[int] = []
    try:
        fitted = fit(
            network,
            batches,
            make_train_config(case),
            diversities=[0.0, 0.0] if case.get("batches") == "separate" else LAMBDAS,
            seeds=SEEDS,
            validation=held_out,
            checkpoint_policy=checkpoint_policy,
            on_progress=lambda progress: told.append(progress.step),
            stop=stop,
        )
    except Interrupted:
        interrupted = True
    finished = gather_network(network)
    if finished is None:
        return {"interrupted": interrupted}
    return {
        "weights": [small_trainings.weights(finished, run) for run in range(2)],
        "history": fitted.history,
        "failures": {run: failure.model_dump() for run, failure in fitted.failures.items()},
        "best_epochs": fitted.best_epochs,
        "interrupted": interrupted,
        "first_step": min(told, default=None),
    }


def assert_same_training(ours: dict[str, Any], theirs: dict[str, Any], within: float = EXACT) -> None:
    for mine, other in zip(ours["weights"], theirs["weights"], strict=True):
        assert_same(mine, other, within=within)
    assert len(ours["history"]) == len(theirs["history"]) > 0
    for mine, other in zip(ours["history"], theirs["history"], strict=True):
        assert (mine["epoch"], mine["step"]) == (other["epoch"], other["step"])
        assert mine["score"] == pytest.approx(other["score"], abs=within)
        assert (mine["held_out"] is None) == (other["held_out"] is None)
        if mine["held_out"] is not None:
            for one, two in zip(mine["held_out"], other["held_out"], strict=True):
                assert one == (two if two is None else pytest.approx(two, abs=within))
    assert ours["best_epochs"] == theirs["best_epochs"]
    assert ours["failures"] == theirs["failures"]


CASES: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"batches": "separate"},
    "exchanged": {"batches": "exchanged"},
    "exchanged and weighted": {"batches": "exchanged", "weighted": True},
    "weighted": {"weighted": True},
    "separate and weighted": {"batches": "separate", "weighted": True},
    "a batch that does not divide": {"size": 7, "weighted": True},
    "regression": {"task": "regression"},
    "regression, exchanged": {"task": "regression", "batches": "exchanged", "weighted": True},
    "sgd": {"optimizer": "sgd"},
    "early stopping": {"patience": 1},
    "early stopping, regression": {"patience": 2, "task": "regression"},
}


LAYOUTS = [(2, "data"), (2, "members"), (4, "2x2")]


@pytest.mark.parametrize(
    ("size", "layout", "name"),
    [(size, layout, name) for size, layout in LAYOUTS for name in CASES] + [(3, "3x1", "early stopping")],
)
def test_training_equals_one_process(size: int, layout: str, name: str) -> None:
    first, *others = team().run(size, train, CASES[name], layout)
    assert others == [{"interrupted": False}] * (size - 1)
    assert_same_training(first, train(CASES[name], None))


@pytest.mark.parametrize("batches", ["shared", "exchanged"])
def test_members_that_do_not_divide_over_four_ranks_equal_one_process(batches: str) -> None:
    case = {"batches": batches, "count": 5, "weighted": True}
    assert_same_training(team().run(4, train, case, "members")[0], train(case, None))


@pytest.mark.parametrize("kind", ["smoc", "trunk"])
@pytest.mark.parametrize("more", [{}, {"batches": "exchanged"}, {"patience": 1}], ids=str)
def test_a_shared_trunk_on_two_ranks_equals_one_process(kind: str, more: dict[str, Any]) -> None:
    case = {"kind": kind, "weighted": True, **more}
    assert_same_training(team().run(2, train, case, "data")[0], train(case, None))


def test_exchanged_batches_with_batch_norm_over_ranks_of_members_equal_one_process() -> None:
    # SGD: Adam would enlarge the rounding of the gradients before a norm, which are 0
    case = {"kind": "norm", "batches": "exchanged", "weighted": True, "optimizer": "sgd"}
    assert_same_training(team().run(2, train, case, "members")[0], train(case, None))


def test_training_on_half_the_batch_or_members_differs() -> None:
    """The comparison can fail: half of the batch, or of the members, trains to something else."""
    alone = train({}, None)
    half = train({"size": BATCH // 2}, None)
    with pytest.raises(AssertionError):
        assert_same_training(half, alone)


def batch_norm() -> dict[str, Tensor]:
    network = shard_network(make_network("norm"), Ranks("data"))
    fit(network, make_batches(BATCH, "classification", False), make_train_config({}), diversities=LAMBDAS, seeds=SEEDS)
    return network.state_dict()


def test_ranks_have_the_same_weights_and_the_first_ones_statistics() -> None:
    first, second = team().run(2, batch_norm)
    for name, value in first.items():
        if "running" in name or "num_batches" in name:
            continue  # those of the last step are each rank's own; the first rank's are the ones that count
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("batches", ["shared", "exchanged"])
def test_dropout_over_ranks_of_members_equals_one_process(batches: str) -> None:
    case = {"kind": "dropout", "batches": batches}
    assert_same_training(team().run(2, train, case, "members")[0], train(case, None))


def dropout_in_training() -> Tensor:
    network = shard_network(make_network("dropout"), Ranks("data"))
    network.set_seeds(SEEDS)
    return network(make_batches(BATCH, "classification", False).split.x[:18].view(2, 9, FEATURES)).detach()


def test_ranks_with_the_same_members_draw_other_dropout_masks() -> None:
    first, second = team().run(2, dropout_in_training)
    assert not torch.equal(first, second)  # of the same samples


# -- predictions ------------------------------------------------------------------------------------------------------


def predict(kind: str, layout: str, count: int) -> tuple[Tensor, dict[str, Any]]:
    network = shard_network(make_network(kind), Ranks(layout))
    x = make_batches(BATCH, "classification", False).split.x[:count]
    y = make_batches(BATCH, "classification", False).split.y[:count]
    logits, target = predict_logits(network, [(x[:5], y[:5]), (x[5:], y[5:])] if count > 5 else [(x, y)])
    return torch.stack(logits), evaluate(logits[1], target).metrics  # scored by each rank for itself


@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize(
    ("kind", "size", "layout"),
    [("separate", 4, "data"), ("separate", 4, "2x2"), ("separate", 2, "members"), ("smoc", 2, "data")],
)
def test_every_sample_is_predicted_by_every_member_once(kind: str, size: int, layout: str, count: int) -> None:
    split = make_batches(BATCH, "classification", False).split
    whole = make_network(kind).predict(split.x[:count])
    metrics = evaluate(whole[1], split.y[:count]).metrics
    for logits, found in team().run(size, predict, kind, layout, count):
        torch.testing.assert_close(logits, whole, rtol=0, atol=EXACT)
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, abs=EXACT), name


# -- communication ----------------------------------------------------------------------------------------------------


def sent_in_a_step(layout: str, case: dict[str, Any]) -> tuple[list[tuple[str, int]], int]:
    """Return the communication of a rank in its second step and its number of parameters."""
    network = shard_network(make_network("separate", case["hidden"]), Ranks(layout, backend="counting"))
    config = make_train_config(case)
    stepper = TrainStep(network, make_optimizer(config, list(network.parameters())), config)
    batches = make_batches(BATCH, "classification", False)
    own = case.get("batches", "shared") != "shared"
    seeds, streams = (SEEDS, [0, 0]) if not own else ([3, 3, 3, 4, 4, 4], [0, 1, 2] * 2)
    x, y = batches.batch_many(seeds, 0, 0, streams=streams)
    if own:
        x, y = x.unflatten(0, (2, 3)), y.unflatten(0, (2, 3))
    inputs = (x, y, None, torch.tensor(LAMBDAS, dtype=torch.float64), torch.tensor([True, True]))
    stepper(*inputs)
    with counting() as sent:
        stepper(*inputs)
    return sent, sum(p.numel() for p in network.parameters())


MIXTURE = 2 * BATCH * CLASSES * 8  # of two runs, in float64


@pytest.mark.parametrize("hidden", [5, 300])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, [("allreduce", MIXTURE)]),
        ({"batches": "exchanged"}, [("allreduce", 3 * MIXTURE)]),  # the batches of all members
        ({"batches": "separate"}, []),
    ],
)
def test_member_parallel_sends_the_mixture_and_nothing_that_grows_with_the_parameters(
    case: dict[str, Any], expected: list[tuple[str, int]], hidden: int
) -> None:
    for sent, _ in team().run(2, sent_in_a_step, "members", {**case, "hidden": hidden}, backend="counting"):
        assert sent == expected


def test_data_parallel_sends_the_gradients() -> None:
    """The counter sees what grows with the parameters: DDP's buckets."""
    for sent, parameters in team().run(2, sent_in_a_step, "data", {"hidden": 300}, backend="counting"):
        assert sum(size for operation, size in sent if operation == "allreduce") == 8 * parameters


def sent_in_a_training(hidden: int) -> list[tuple[str, int]]:
    with counting() as sent:
        train({"hidden": hidden, "steps": 60}, "members", backend="counting")
    return sent


def test_a_whole_training_sends_no_parameters_until_it_is_done() -> None:
    for hidden in (5, 300):
        for sent in team().run(2, sent_in_a_training, hidden, backend="counting"):
            assert {operation for operation, _ in sent} == {"allreduce", "allgather"}
            steps = [place for place, (operation, _) in enumerate(sent) if operation == "allreduce"]
            assert [sent[place][1] for place in steps] == [MIXTURE] * 60
            # agreements about signals, clocks, failures and scores: a few numbers for each of two runs
            told = [size for operation, size in sent[: steps[-1]] if operation == "allgather"]
            assert told
            assert max(told) <= 6 * 8


# -- failures, checkpoints, signals -----------------------------------------------------------------------------------


def train_with_inf(layout: str | None, where: str) -> Any:
    """Member 2 of the second run holds Inf from the start, or gets it in the first step's gradient."""
    network = make_network("separate")
    part = network if layout is None else shard_network(network, Ranks(layout))
    weight = part.members.stacked.fc.weight  # type: ignore[union-attr]
    inf = torch.zeros_like(network.members.stacked.fc.weight)  # type: ignore[union-attr]
    inf[5] = torch.inf
    mine = shard_state(part, {"inf": inf})["inf"]
    if where == "weight":
        with torch.no_grad():
            weight += mine
    else:
        weight.register_hook(lambda gradient: gradient + mine)
    fitted = fit(
        part, make_batches(BATCH, "classification", False), make_train_config({}), diversities=LAMBDAS, seeds=SEEDS
    )
    return {run: failure.model_dump() for run, failure in fitted.failures.items()}


@pytest.mark.parametrize("where", ["weight", "gradient"])
@pytest.mark.parametrize(("size", "layout"), [(2, "members"), (2, "data"), (4, "2x2")])
def test_every_rank_names_the_member_that_failed(size: int, layout: str, where: str) -> None:
    alone = train_with_inf(None, where)
    assert list(alone) == [1]
    assert (alone[1]["member"], alone[1]["step"]) == (2, 0)  # of the second rank, where members are spread
    assert team().run(size, train_with_inf, layout, where) == [alone] * size


RESUMED = [("members", None), (None, "members"), ("data", "members"), ("2x2", "data"), ("members", "2x2")]
WITH_TRUNKS = [{"kind": "smoc"}, {"kind": "trunk", "patience": 2}]


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [(case, *layouts) for case in ({}, {"patience": 2}, {"optimizer": "sgd"}) for layouts in RESUMED]
    + [(case, *layouts) for case in WITH_TRUNKS for layouts in ((None, "data"), ("data", None), ("data", "data"))],
    ids=str,
)
def test_any_number_of_ranks_resumes_from_a_checkpoint(
    tmp_path: Path, case: dict[str, Any], before: str | None, after: str | None
) -> None:
    """Stopped in the middle of an epoch, told on the last rank alone."""
    uninterrupted = train(case, None)

    def run(layout: str | None, **more: Any) -> list[Any]:
        if layout is None:
            return [train({**case, **more}, None, str(tmp_path))]
        return team().run(4 if layout == "2x2" else 2, train, {**case, **more}, layout, str(tmp_path))

    last = {None: 0, "2x2": 3}.get(before, 1)
    first = run(before, stop={last: 2}, every=3)  # yes to the third question, at the third step or before the fourth
    assert all(rank["interrupted"] for rank in first)
    (state,) = tmp_path.glob("state-*.safetensors")
    again = run(after)[0]
    assert_same_training(again, uninterrupted)
    assert again["first_step"] > int(state.stem.removeprefix("state-")) > 0  # it resumed


def stops_together(folder: str) -> list[int]:
    """Steps that were made before all ranks stopped, told by a signal to one of them."""
    made: list[int] = []
    told = [False]
    before = signal.signal(signal.SIGTERM, lambda *_: told.__setitem__(0, True))
    whole = make_network("separate")
    network = shard_network(whole, Ranks("members"))
    real = TrainStep.__call__

    def noted(self: TrainStep, *inputs: Any) -> Any:
        made.append(len(made))
        if dist.get_rank() == 1 and len(made) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *inputs)

    TrainStep.__call__ = noted  # type: ignore[method-assign]
    try:
        checkpoint_policy = CheckpointPolicy(Checkpoints(Path(folder)), every_seconds=None)
        data = make_batches(BATCH, "classification", False)
        config = make_train_config({"steps": 100_000})
        fit(
            network,
            data,
            config,
            diversities=LAMBDAS,
            seeds=SEEDS,
            checkpoint_policy=checkpoint_policy,
            stop=lambda: told[0],
        )
    except Interrupted:
        return made
    finally:
        TrainStep.__call__ = real  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, before)
    return []


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    first, second = team().run(2, stops_together, str(tmp_path))
    assert first == second
    assert len(first) >= 5
    manifest = json.loads((tmp_path / "manifest.json").read_text())["progress"]
    assert manifest["step"] == len(first)


# -- lost ranks, errors -----------------------------------------------------------------------------------------------


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    os.environ["TORCHACE_TIMEOUT"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["TORCHACE_TIMEOUT"]


def wait_for_silent_rank(group: str) -> str:
    """The second rank is alive and does not answer."""
    dist.barrier()  # both are there: what follows takes no time
    with timeout(2.0):
        ranks = Ranks("members" if group == "members" else "data")
    if dist.get_rank() == 0:
        try:
            with detect_lost_rank():
                dist.all_reduce(torch.zeros(3), group=ranks.members_group if group == "members" else ranks.data_group)
        except RankLostError as error:
            return str(error)
        return "answered"
    return ""


@pytest.mark.parametrize("group", ["members", "data"])
def test_a_rank_that_does_not_respond_ends_the_job(group: str) -> None:
    first, _ = team().run(2, wait_for_silent_rank, group)
    assert first == (
        "Rank 0 lost contact with the others: one of them ended or does not respond. "
        "Checkpoints and finished runs are kept; repeat the command to resume."
    )


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), detect_lost_rank():
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def compare() -> list[str]:
    found = []
    rank = dist.get_rank()
    for what in (
        {"experiment": "a", "device": "cpu"},
        {"experiment": "a", "device": f"cuda {rank // 2}"},
        {"experiment": f"{rank}", "device": "cpu"},
    ):
        try:
            check_same(what)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_ranks_with_different_arguments_are_refused() -> None:
    found = team().run(4, compare)
    assert found == [found[0]] * 4
    same, device, experiment = found[0]
    assert same == ""
    start = "Start all ranks with one command."
    assert device == f"Expected the same device on every rank, but rank 2 differs from rank 0. {start}"
    assert experiment == f"Expected the same experiment on every rank, but rank 1 differs from rank 0. {start}"


def test_a_message_is_printed_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        assert [should_report(store) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch", "Expected data, members or MxD .* for --parallel, but got 'batch'"),
        ("0x4", "Expected data, members or MxD"),
        ("2x3", "Expected 6 processes for --parallel 2x3, but got 4"),
    ],
)
def test_invalid_layouts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text, 4)


def check_refusal() -> list[str]:
    ranks = Ranks("members")
    calls: list[Callable[[], Any]] = [
        lambda: shard_network(run_group([[mlp(FEATURES, 3, CLASSES)]]), ranks),
        lambda: shard_network(make_network("smoc"), ranks),
        lambda: shard_network(make_network("trunk"), ranks),
        lambda: train({"size": 1}, "data"),
    ]
    found = []
    for call in calls:
        try:
            call()
        except (ValueError, TypeError) as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_wrong_use() -> None:
    first, second = team().run(2, check_refusal)
    assert first == second
    assert first == [
        "Expected at most one rank for each of 1 members, but got 2 ranks. Use fewer ranks, or --parallel 1xD to split "
        "the batch over D ranks.",
        *[
            "Expected members without shared weights for --parallel members, but they share some. Use --parallel data, "
            "which splits the batch."
        ]
        * 2,
        "Expected batches of at least 2 samples, one for each rank, but got 1. Use larger batches or fewer ranks.",
    ]
