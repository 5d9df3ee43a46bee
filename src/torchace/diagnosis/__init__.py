"""Diagnosis of an ensemble from its predictions: do the members differ, do they help, are they calibrated?"""

from torchace.diagnosis.api import diagnose, diagnose_file
from torchace.diagnosis.diagnosis import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_file"]
