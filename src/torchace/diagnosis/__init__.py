"""Diagnosis of an ensemble from its predictions."""

from torchace.diagnosis.api import diagnose, diagnose_file
from torchace.diagnosis.diagnosis import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_file"]
