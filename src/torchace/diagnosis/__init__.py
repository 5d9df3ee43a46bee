"""Whether an ensemble's diversity is real: what its predictions tell, in words, numbers and figures."""

from torchace.diagnosis.api import diagnose, diagnose_file
from torchace.diagnosis.diagnosis import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_file"]
