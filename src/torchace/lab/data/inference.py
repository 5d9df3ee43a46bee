"""Inference of a table's schema from its values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.errors import DataError, arrow, first_duplicate, pandas, quote, row_number
from torchace.lab.data.notes import find_code, find_unit, note_leaks, note_numbers, note_spellings, settle_dates
from torchace.lab.data.parsing import (
    MIN_SHARE,
    MISSING,
    MIXED_DATES,
    CellError,
    canonical,
    date_format,
    dates,
    is_category,
    is_numeric,
    number_formats,
    numbers,
    positions,
    texts,
)
from torchace.lab.data.table_schema import (
    KINDS,
    TASKS,
    Column,
    Label,
    Schema,
    Target,
    check_columns,
    check_features,
    check_targets,
    get_column,
    target_texts,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped]

MIN_ROWS = 10
# whole numbers are classes if few, with several rows each
MAX_NUMBERED_CLASSES = 20
MIN_ROWS_PER_NUMBERED_CLASS = 3
MAX_DISTINCT = 0.9  # a larger fraction of distinct texts means identifiers or free text
TEXT_WORDS, TEXT_DISTINCT = 4, 0.5  # free text too: mean number of words, fraction of distinct texts
MIXED_DISTINCT = 10  # with more distinct texts, a mix of dates or numbers and texts looks like a mistake
MIXED_NUMBERS = 0.5  # a smaller share of numbers is usual among codes

_IDENTIFIER = re.compile(
    r"(?i:^(id|uuid|guid|index|idx|key|row|row[ _.]?(id|names?|numbers?|no|nr)|unnamed:? ?0)$)"
    r"|(?i:[ _.-](id|uuid|guid|key|nr|no)$)|[a-z](ID|Id)$"
)


def infer_schema(
    frame: DataFrame,
    target: str | Sequence[str],
    task: str | None = None,
    drop: Collection[str] = (),
    *,
    kinds: Mapping[str, str] | None = None,
) -> Schema:
    """Infer the schema of a table from its values; decisions are recorded in `notes` and `dropped`.

    Targets of texts, truth values or a few whole numbers (`MAX_NUMBERED_CLASSES`) mean classification, others
    regression. Several targets mean regression. See `infer_columns` for the other columns; `kinds` overrides their kind
    by name (or "drop").
    """
    frame, kinds = check_columns(frame), kinds or {}
    drop = [drop] if isinstance(drop, str) else drop
    targets = [target] if isinstance(target, str) else list(target)
    _check_request(frame, targets, task, drop, kinds)
    if len(frame) < MIN_ROWS:
        raise DataError(f"The table has {len(frame)} rows, too few to learn from; give at least {MIN_ROWS}.")
    notes: list[str] = list(frame.attrs.get("notes", ()))
    left_out = {*drop, *(name for name, kind in kinds.items() if kind == "drop")}
    formats = number_formats({name: frame[name] for name in frame.columns if name not in left_out})
    if len(targets) > 1:
        task = "regression"
        if others := [name for name in targets if formats[name][1] < MIN_SHARE]:
            raise DataError(f"Several targets must all be numbers, but {quote(others[0])} is not; leave it out.")
    found = [_infer_target(frame[name], task, formats[name], notes) for name in targets]
    predicted = replace(found[0], names=tuple(targets), formats=tuple(f for one in found for f in one.formats))
    features = [name for name in frame.columns if name not in left_out and name not in targets]
    columns, dropped, more = infer_columns(frame[features], kinds, formats)
    if not columns:
        why = f" ({quote(dropped[-1][0])} is left out: {dropped[-1][1]})" if dropped else ""
        raise DataError(
            f"No column is left to predict {quote(predicted.name)} from{why}; give a table with columns of numbers or "
            "of categories that vary."
        )
    notes += more
    quantities = [Column(n, "number", f) for n, f in zip(targets, predicted.formats, strict=False)]  # none of classes
    note_numbers(frame, [*columns, *quantities], notes)
    note_leaks(frame, columns, predicted, notes)
    requested = [(name, "as requested") for name in frame.columns if name in left_out]
    return Schema(columns, predicted, tuple(notes), (*dropped, *requested))


def infer_columns(
    frame: DataFrame, kinds: Mapping[str, str] | None = None, formats: Mapping[str, tuple[str, float]] | None = None
) -> tuple[tuple[Column, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Infer the kind and format of every column of a table; return columns, those left out with reasons, and notes.

    Columns of numbers (`MIN_SHARE` of the cells, in one of `NUMBER_FORMATS`) are "number", columns of dates "date",
    other texts, truth values and pandas categories "category". Left out, unless `kinds` gives the kind: columns that
    are empty, constant, identifiers, free text, or equal to an earlier column. `formats` is the result of
    `number_formats`, if known.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"id": range(7, 12), "price": ["1,5", "2,25", "?", "3", "4,5"], "fur": list("abaab")})
        >>> columns, dropped, _ = infer_columns(frame)
        >>> [(column.name, column.kind, column.format) for column in columns], dropped[0][0]
        ([('price', 'number', '1234,5'), ('fur', 'category', '')], 'id')
    """
    frame, kinds = check_columns(frame), kinds or {}
    formats = formats or number_formats({name: frame[name] for name in frame.columns})
    columns: list[Column] = []
    row_numbers: list[Column] = []
    dropped: list[tuple[str, str]] = []
    notes: list[str] = []
    seen: dict[bytes, str] = {}
    for name in frame.columns:
        column = _infer_column(frame[name], kinds.get(name), formats[name], notes, seen)
        if isinstance(column, str):
            dropped.append((name, column))
        elif name not in kinds and column.kind == "number" and _is_row_number(frame[name], column.format):
            row_numbers.append(column)
        else:
            columns.append(column)
    if columns:
        dropped += [(column.name, "an identifier: it numbers the rows") for column in row_numbers]
    return settle_dates(frame, columns or row_numbers, notes), tuple(dropped), tuple(notes)


def skip_missing_targets(frame: DataFrame, targets: Sequence[str], task: str | None = None) -> DataFrame:
    """Leave out the rows without a value in one of the targets, and add a note; the index keeps their numbers."""
    missing = np.any([missing_targets(get_column(frame, name, "the target"), task) for name in targets], 0)
    kept = frame[~missing]
    if missing.any():
        skipped = f"{int(missing.sum())} of {len(frame)} rows have no target and are skipped."
        kept.attrs["notes"] = [skipped, *frame.attrs.get("notes", ())]
    return kept


def missing_targets(column: Series, task: str | None = None) -> NDArray[np.bool_]:
    """Rows without a target, `(N,)`."""
    _, share = number_formats({"": column})[""]
    if is_numeric(column) or task == "regression" or (task is None and share >= MIN_SHARE):
        return np.asarray(texts(column).is_null())
    return np.asarray(texts(column, MISSING).is_null())


def _check_request(
    frame: DataFrame, targets: Sequence[str], task: str | None, drop: Collection[str], kinds: Mapping[str, str]
) -> None:
    for target in targets:
        get_column(frame, target, "the target")
    if (twice := first_duplicate(targets)) is not None:
        raise DataError(f"The target {quote(twice)} is given twice; give each target once.")
    if len(targets) > 1 and task == "classification":
        raise DataError("Several targets need regression; give one target for classification.")
    if task not in (None, *TASKS):
        raise DataError(f"The task {quote(task)} is not known; choose {' or '.join(TASKS)}, or leave it out.")
    for name in [*drop, *kinds]:
        get_column(frame, name, "to be dropped or with a given kind")
        if name in targets:
            raise DataError(f"The column {quote(name)} is the target; choose another target, or keep this column.")
    for name, kind in kinds.items():
        if kind not in (*KINDS, "drop"):
            raise DataError(
                f"The kind {quote(kind)} of column {quote(name)} is not known; use number, category, date or drop."
            )


# -- kinds of columns --------------------------------------------------------------------------------------------------


def _infer_column(
    cells: Series, requested: str | None, found: tuple[str, float], notes: list[str], seen: dict[bytes, str]
) -> Column | str:
    """Column of a table, or the reason for leaving it out."""
    name, (format, share) = str(cells.name), found
    kind = requested or ("number" if share >= MIN_SHARE else "category")
    code = find_code(cells) if requested is None and kind == "number" else None
    kind, number_share = (kind, share) if code is None else ("category", 0.0)
    try:
        if kind == "date" or (requested is None and kind == "category" and not is_category(cells)):
            format, share = date_format(cells)
            kind = "date" if share >= MIN_SHARE else kind
        if kind == "category":
            column = texts(cells)
        else:
            values, invalid = (dates if kind == "date" else numbers)(cells, format)
    except CellError as error:
        if requested is not None:
            raise
        return error.found
    if kind == "category":
        if requested is None and (reason := _reject_category(cells, column, share, number_share, seen, notes)):
            return reason
        if code is not None:
            notes.append(f"Column {quote(name)} holds codes, such as {quote(code)}; set its kind to number if not.")
        return Column(name, "category")
    lenient = bool(invalid.any()) and share >= MIN_SHARE
    check_features(cells, values, invalid & (not lenient), kind)
    if requested is None and (reason := _reject_numbers(cells, values, seen)):
        return reason
    if lenient:
        example = quote(cells.iloc[int(np.flatnonzero(invalid)[0])])
        notes.append(
            f"Column {quote(name)} holds {kind}s; {int(invalid.sum())} of {int((invalid | ~np.isnan(values)).sum())} "
            f"values, such as {example}, are not and count as missing."
        )
    if kind == "number" and format:
        pc = arrow("pyarrow.compute")
        signs = pc.match_substring(texts(cells).drop_null(), "%")
        if (count := int(pc.sum(signs).as_py())) not in (0, len(signs)):
            notes.append(f"Column {quote(name)} has a percent sign in {count} of {len(signs)} values; it is ignored.")
    return Column(name, kind, format, lenient)


def _reject_numbers(cells: Series, values: NDArray[np.float64], seen: dict[bytes, str]) -> str | None:
    """Reason for leaving out numbers or dates: missing, constant, an identifier or a duplicate."""
    present = values[~np.isnan(values)]
    distinct = len(np.unique(present))
    is_whole = bool((present == np.floor(present)).all())
    exact = cells.nunique() if distinct and np.abs(present).max() >= 2**53 else distinct  # float64 merges some
    is_named = _IDENTIFIER.search(str(cells.name)) is not None and 1 < exact > MAX_DISTINCT * len(present)
    if is_whole and (is_named or distinct == 1 < exact):
        return f"an identifier: {exact} of {len(present)} values differ"
    return _reject_constant(cells, len(present), distinct) or _reject_duplicate(cells, values.tobytes(), seen)


def _reject_category(
    cells: Series, column: Any, date_share: float, number_share: float, seen: dict[bytes, str], notes: list[str]
) -> str | None:
    """Reason for leaving out texts: missing, constant, identifiers, free text, a mixture or a duplicate."""
    pc = arrow("pyarrow.compute")
    present = column.drop_null()
    labels = present.unique()
    distinct = len(labels)
    if reason := _reject_constant(cells, len(present), distinct):
        return reason
    if date_share >= max(MIXED_DATES, number_share) and distinct > MIXED_DISTINCT:  # 1990.5 is both
        return f"{100 * date_share:.0f} % of its values are dates, the others are not; correct them"
    is_mixed = number_share >= MIXED_NUMBERS and distinct > MIXED_DISTINCT
    unit = find_unit(labels) if distinct > MIXED_DISTINCT and not is_mixed else None
    words = pc.mean(pc.count_substring_regex(present, r"\S+")).as_py()
    if distinct > MAX_DISTINCT * len(present) or (words >= TEXT_WORDS and distinct > TEXT_DISTINCT * len(present)):
        if is_mixed:
            return f"{100 * number_share:.0f} % of its values are numbers, the others are not; correct them"
        if unit is not None:
            return f"its numbers have text beside them, such as {quote(unit)}; write the numbers alone"
        return f"{'free text' if words > 1 else 'an identifier'}: {distinct} of {len(present)} values differ"
    if reason := _reject_duplicate(cells, pandas().util.hash_array(column.to_pandas().to_numpy()).tobytes(), seen):
        return reason
    if is_mixed:
        share = f"{100 * number_share:.0f} % of its values are numbers"
        notes.append(f"Column {quote(cells.name)} is read as categories, though {share}; correct the others.")
    if unit is not None:
        notes.append(
            f"Column {quote(cells.name)} is read as categories, though its values are numbers with text beside them, "
            f"such as {quote(unit)}; write the numbers alone."
        )
    note_spellings(f"Column {quote(cells.name)}", labels, notes)
    return None


def _reject_constant(cells: Series, present: int, distinct: int) -> str | None:
    if not present:
        return "it is empty"
    return f"it is {quote(cells.iloc[0])} in every row" if distinct == 1 and present == len(cells) else None


def _reject_duplicate(cells: Series, content: bytes, seen: dict[bytes, str]) -> str | None:
    first = seen.setdefault(content, str(cells.name))
    return None if first == cells.name else f"its values are those of {quote(first)}"


def _is_row_number(column: Series, format: str) -> bool:
    """Whether numbers are 0, 1, 2, … or 1, 2, 3, …."""
    for cells in (column.iloc[:2], column):  # the first two rule out most columns
        values, _ = numbers(cells, format)
        if len(values) < 2 or values[0] not in (0, 1) or not (np.diff(values) == 1).all():
            return False
    return True


# -- the target --------------------------------------------------------------------------------------------------------


def _infer_target(column: Series, task: str | None, found: tuple[str, float], notes: list[str]) -> Target:
    name, (format, share) = str(column.name), found
    values, invalid = numbers(column, format)
    # a few wrong cells among many numbers are an error, among few numbers another class
    many = share >= MIN_SHARE and len(np.unique(values[~np.isnan(values)])) > MAX_NUMBERED_CLASSES
    is_number = many or not invalid.any()
    if is_number or task == "regression":
        check_targets(column, values, invalid)
    if task is None and is_number and (values != np.floor(values)).any():
        task = "regression"
    elif task is None and is_number:
        distinct = len(np.unique(values))
        few = distinct <= min(MAX_NUMBERED_CLASSES, len(values) / MIN_ROWS_PER_NUMBERED_CLASS)
        task, other = TASKS if few else TASKS[::-1]
        notes.append(
            f"The target {quote(name)} has {distinct} different whole numbers, which are treated as "
            f"{'classes' if few else 'quantities'}; set the task to {other} if they are not."
        )
    if task != "regression":
        target = Target((name,), "classification", _infer_classes(column, is_number and not format))
        note_spellings(f"The target {quote(name)}", arrow().array(target.class_names), notes)
        return target
    if len(np.unique(values)) == 1:
        raise DataError(
            f"The target {quote(name)} is {quote(column.iloc[0])} in every row, so there is nothing to predict; choose "
            "another column."
        )
    return Target((name,), task, formats=(format,))


def _infer_classes(column: Series, is_number: bool) -> tuple[Label, ...]:
    """Sorted classes, each in its most frequent spelling, in the type of the column."""
    name, cells = quote(column.name), target_texts(column)
    counts = {entry["values"]: entry["counts"] for entry in cells.value_counts().to_pylist()}
    forms = {text: canonical(text) for text in counts}
    if not is_number and not set(forms.values()) <= {"true", "false"}:
        forms = {text: text for text in counts}  # 1 and 1.0 differ among words
    rows: dict[str, int] = {}
    spelling: dict[str, str] = {}
    for text, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        rows[forms[text]] = rows.get(forms[text], 0) + count
        spelling.setdefault(forms[text], text)
    total = sum(rows.values())
    if len(rows) == 1:
        raise DataError(
            f"The target {name} has only one class, {quote(next(iter(spelling.values())))}, so there is nothing to "
            "predict; choose another column, or add rows of other classes."
        )
    if len(rows) > total / 2:
        raise DataError(
            f"The target {name} has {len(rows)} classes in {total} rows, too many to learn; choose another column, or "
            "set the task to regression if it is a quantity."
        )
    if single := [form for form, count in rows.items() if count == 1]:
        place = int(np.flatnonzero(positions(cells, single[:1]) == 0)[0])
        raise DataError(
            f"The class {quote(spelling[single[0]])} of the target {name} has only one row, row "
            f"{row_number(column, place)}, too few for training and test parts; remove it, or add rows of it"
            f"{', or set the task to regression' if is_number else ''}."
        )
    ordered = sorted(rows, key=(lambda form: (float(form), form)) if is_number else (lambda form: (0.0, form)))
    types, dtype = pandas().api.types, column.cat.categories.dtype if is_category(column) else column.dtype
    convert: Callable[[str], Label] = str
    if types.is_bool_dtype(dtype):
        convert = "True".__eq__
    elif types.is_numeric_dtype(dtype):
        convert = int if types.is_integer_dtype(dtype) else float
    return tuple(convert(spelling[form]) for form in ordered)
