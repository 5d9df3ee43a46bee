"""Digest of a run's weights, equal for bit-identical runs."""

from torchace.lab.training.checkpoint import run_weights, state_digest
from torchace.lab.training.run_group import RunGroup


def weights_digest(network: RunGroup, run: int) -> str:
    return state_digest(run_weights(network, run))
