"""Whether an ensemble's diversity is real: what its predictions tell, in words, numbers and figures."""

from torchace.diagnosis.entry import diagnose, diagnose_file
from torchace.diagnosis.verdict import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_file"]
