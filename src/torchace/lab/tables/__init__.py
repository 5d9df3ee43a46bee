"""Fit, evaluate, predict and export models of tables."""

from torchace._extras import import_extra

import_extra("pydantic", "torchace.lab.tables needs")  # the documentation imports from here
