"""The tables of claims: one source, and every number on the page that it links to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[1]


claims: Any = load_script("tools/claims.py")


def test_the_tables_are_those_of_the_source() -> None:
    for path, text in claims.render_pages().items():
        assert path.read_text("utf-8") == text, f"run tools/claims.py: {path.name} differs from claims.toml"


@pytest.mark.parametrize("claim", claims.load_claims(), ids=lambda claim: claim["question"])
def test_every_number_of_a_claim_is_on_its_page(claim: dict[str, str]) -> None:
    page = (ROOT / "docs" / "results" / claim["page"]).read_text("utf-8")
    numbers = re.findall(r"(?<![\w.,])\d[\d.,]*\d|(?<![\w.,-])\d", claim["answer"])
    missing = [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", page)]
    assert missing == []
