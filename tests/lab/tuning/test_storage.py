"""Storages of studies: failing, refused, without the password in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from tests.lab.tuning.search_data import make_split
from tests.lab.tuning.test_optuna_search import PLAN, ended, found
from torchace.lab.tuning.storage import StorageError


@pytest.mark.parametrize("name", ["per%20cent {braces}.db", "hash#question? λ.db"])
def test_files_of_any_name(tmp_path: Path, name: str) -> None:
    result = found(1, tmp_path / name, num_seeds=1)
    assert (tmp_path / name).exists()
    assert found(1, tmp_path / name, num_seeds=1) == result


# -- storage failures -------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_no_finished_trial(tmp_path: Path) -> None:
    """SQLite's own limit, with its own error."""
    file, plan = tmp_path / "study.db", replace(PLAN, epochs=1)
    before = ended(found(2, file, num_seeds=1, plan=plan))
    pages = file.stat().st_size // 4096

    def limit(connection: Any, record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", limit)
    try:
        with pytest.raises(StorageError, match=r"\(database or disk is full\).*repeat the command to resume") as caught:
            found(100, file, num_seeds=1, plan=plan)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", limit)
    assert "\n" not in str(caught.value)
    assert ended(found(2, file, num_seeds=1, plan=plan))[:2] == before


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": make_split(48, 5)}, "holds a search on other data: its train samples differ"),
        ({"plan": replace(PLAN, epochs=7)}, "holds a search with epochs = 6, but now it is 7"),
        ({"num_seeds": 1}, r"holds a search with seeds = \[0, 1\], but now it is \[0\]"),
        ({"plan": replace(PLAN, patience=3)}, "holds a search with patience = None, but now it is 3"),
    ],
)
def test_a_study_of_other_data_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    result = found(1, tmp_path / "study.db")
    with pytest.raises(StorageError, match=f"Study 'torchace' in {tmp_path}/study.db {message}") as caught:
        found(2, tmp_path / "study.db", **options)
    assert "\n" not in str(caught.value)
    assert found(1, tmp_path / "study.db", plan=replace(PLAN, hidden=(3,), num_members=4)) == result  # searched, both


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_foreign_study_is_refused(tmp_path: Path, direction: str) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="torchace", direction=direction)
    study.optimize(lambda trial: 1.0, n_trials=1)
    with pytest.raises(StorageError, match="was not made by torchace"):
        found(1, tmp_path / "study.db")
    assert len(study.trials) == 1


def _text(folder: Path) -> Path:
    (folder / "text.db").write_text("this is not a database, but long enough to be one" * 100)
    return folder / "text.db"


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (_text, r"Cannot use the storage .*text.db \(file is not a database\)"),
        (lambda folder: folder, r"Cannot use the storage .* \(unable to open database file\)"),
        pytest.param(
            lambda folder: "postgresql+psycopg://me:geheim@127.0.0.1:1/db",
            "Cannot use the storage postgresql",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            lambda folder: "postgresql+psycopg://me@127.0.0.1:1/db?password=geheim",
            "Cannot use the storage postgresql",
            marks=pytest.mark.extended,
        ),
        (lambda folder: "postgresql+psycopg://me:geheim@host:port/db", "a URL that cannot be read"),
        (lambda folder: "mysql+pymysql://me:geheim@host/db", r"No driver is installed .*Install pymysql"),
        (
            lambda folder: "nonsense://me:geheim@host/db",
            r"No driver is installed for the storage nonsense://me:\*\*\*@host/db",
        ),
        (lambda folder: "://geheim", "a URL that cannot be read"),
        (lambda folder: "redis://me:geheim@host", r"No driver is installed for the storage redis://me:\*\*\*@host"),
    ],
)
def test_unusable_storage_is_one_sentence(tmp_path: Path, storage: Callable[[Path], str | Path], message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        found(1, storage(tmp_path))
    assert "\n" not in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StorageError, match="Install psycopg"):
        found(1, "postgresql+psycopg://me@host/db")
