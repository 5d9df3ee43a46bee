"""Files of every format, changed at random: the short form of `python -m tests.fuzzing`."""

import pytest

from tests.fuzzing.__main__ import problems, spread
from tests.fuzzing.subjects import SUBJECTS


@pytest.mark.extended
def test_changed_files_are_refused_in_one_sentence_or_harmless() -> None:
    found = spread(list(SUBJECTS), count=16, seed=7, workers=1)
    assert set(found) == set(SUBJECTS)
    assert all(counts["cases"] == 16 and counts["refused"] > 0 for counts in found.values())
    assert not any(problems(found).values()), [note for counts in found.values() for note in counts["notes"]]
