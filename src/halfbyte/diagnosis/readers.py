"""Token tables from files: a run folder of ours, or JSON lines or parquet of any trainer.

One row a response. Columns are found by our names or those that other trainers use (``columns.py``). Rows with a ``step``
make one table a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.diagnosis.columns import find_columns
from halfbyte.diagnosis.tokens import TokenTable, table_of
from halfbyte.errors import DataError, MissingExtraError

__all__ = ["read_tables"]

Row = tuple[str, dict[str, Any]]


def read_tables(source: Path, columns: Mapping[str, str] | None = None) -> list[TokenTable]:
    """All tables of a source, by step.

    Arguments:
        source: a run folder (its saved trajectories), a folder of such files, or one ``.jsonl``, ``.json`` or ``.parquet`` file.
        columns: our name -> the file's, where it is not one of the known names.

    Raises:
        DataError: nothing to read, or a row that cannot be used; the message names file and line.
        MissingExtraError: parquet without pyarrow.
    """
    chosen = dict(columns or {})
    by_step: dict[int | None, list[Row]] = {}
    for path in _files(source):
        named = _step_in_name(path)
        rows = _parquet_rows(path, chosen) if path.suffix == ".parquet" else _json_rows(path, chosen)
        for where, row in rows:
            step = row.pop("step", None)
            step = named if step is None else _whole(step, where)
            by_step.setdefault(step, []).append((where, row))
    tables = [
        table_of(_alike(rows), step)
        for step, rows in sorted(by_step.items(), key=lambda item: (item[0] or 0, item[0] is None))
    ]
    if not any(len(table.ids) for table in tables):
        raise DataError("there is no response to diagnose", where=str(source), expected="at least one row")
    return tables


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError("there is nothing here", where=str(source), expected="a run folder, or a file of trajectories")
    folder = source / "trajectories" if (source / "trajectories").is_dir() else source
    found = sorted(p for p in folder.iterdir() if p.suffix in (".jsonl", ".parquet") and p.name != "metrics.jsonl")
    if not found:
        raise DataError(
            "no trajectories are saved here",
            where=str(folder),
            expected="files ending in .jsonl or .parquet",
            fix="train with --set train.save_trajectories_every=50",
        )
    return found


def _step_in_name(path: Path) -> int | None:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits != path.stem and digits.isascii() and digits.isdigit() else None


def _json_rows(path: Path, chosen: Mapping[str, str]) -> Iterator[Row]:
    names: dict[str, str] | None = None
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"not JSON: {error}", where=where, expected="one JSON object a line") from error
                if not isinstance(value, dict):
                    raise DataError("not a JSON object", where=where, expected="one JSON object a line")
                names = names or find_columns(value, chosen, where)
                yield where, _renamed(value, names, where)
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: {error.reason}", where=str(path), expected="JSON lines, or .parquet"
        ) from error


def _parquet_rows(path: Path, chosen: Mapping[str, str]) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError(
            "reading parquet needs pyarrow", where=str(path), fix="pip install 'halfbyte[parquet]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        names = find_columns(file.schema_arrow.names, chosen, str(path))
        number = 0
        for batch in file.iter_batches(columns=sorted(set(names.values())), batch_size=256):
            columns = {name: _cells(batch.column(column)) for name, column in names.items()}
            for i in range(batch.num_rows):
                yield f"{path}: row {number}", {name: cells[i] for name, cells in columns.items()}
                number += 1
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"not a parquet file: {error}", where=str(path)) from error


def _cells(column: Any) -> list[Any]:
    """Values of a parquet column: lists of numbers without a detour through Python objects."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        values = column.values.to_numpy(zero_copy_only=False)
        offsets = column.offsets.to_pylist()
        valid = column.is_valid().to_pylist()
        return [values[a:b] if ok else None for a, b, ok in zip(offsets, offsets[1:], valid)]
    out: list[Any] = column.to_pylist()
    return out


def _renamed(value: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    missing = [column for column in names.values() if column not in value]
    if missing:
        raise DataError(
            f"the line lacks {', '.join(missing)}", where=where, expected="the same fields on every line of a file"
        )
    return {name: value[column] for name, column in names.items()}


def _whole(step: Any, where: str) -> int:
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not float(step).is_integer():
        raise DataError(f"step is {step!r}", where=where, expected="an integer")
    return int(step)


def _alike(rows: list[Row]) -> list[Row]:
    """Rows with the optional columns that all of them have."""
    common = set.intersection(*({name for name, value in row.items() if value is not None} for _, row in rows))
    common |= {"reward"} if all("reward" in row for _, row in rows) else set()
    always = {"response_ids", "rollout_logprobs", "learner_logprobs", "advantages", "mask"}
    return [(where, {k: v for k, v in row.items() if k in common | always}) for where, row in rows]
