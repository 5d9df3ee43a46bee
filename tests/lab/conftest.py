"""Fixtures of the command line."""

import pytest

from tests.lab.cli.command_line import Invoke, fake_report


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    return Invoke(monkeypatch, capsys)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds; where the test is about something else, a page is enough."""
    monkeypatch.setattr("torchace.lab.report.write_report", fake_report)


@pytest.fixture
def always_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """λ auto searches on small tables too, and if no gain is expected."""
    monkeypatch.setattr("torchace.lab.tuning.auto.ZeroDiversity.reason", lambda self: "")
