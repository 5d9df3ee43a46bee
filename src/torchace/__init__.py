"""torchace trains ensembles jointly, with one knob for how much the members may differ."""

from torchace import functional
from torchace.functional import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["functional", *functional.__all__]
