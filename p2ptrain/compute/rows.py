"""What the files of a corpus hold: texts, rows with a text, or conversations. Rows that cannot be used are counted.

A *row* is a line of a ``.jsonl`` file or an item of a JSON array, a record of a ``.csv`` or ``.tsv`` file (its first
record names the columns) or a row of a ``.parquet`` file. Files may be compressed with gzip. Which rows are left out
depends on the files alone, so members with equal files keep equal corpora.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from p2ptrain.compute.device import HOST, check_memory
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import format_of, is_stdlib, kind_of, unreadable
from p2ptrain.core.texts import human_bytes, shortened

Messages = list[dict[str, Any]]
"""A conversation: each message has a ``role`` and a ``content``, and an answer that is not learned the ``weight`` 0."""

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 1024
_EXAMPLES = 3  # bad rows that a warning names
_PART_BYTES = 1 << 24
_MAX_FIELD_CHARACTERS = 1 << 24  # of a .csv: Python's reader takes up to 13 bytes for each
_CSV_LINE = re.compile(r"[^\r\n]*[\r\n]|[^\r\n]+")


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why a row cannot be used, in words that follow its place; and what to do."""

    why: str
    remedy: str


_NOT_UNICODE = BadRow("has a byte that is not UTF-8, or half of a surrogate pair", "write the text as UTF-8")


class Rows:
    """Reads files in order.

    Args:
        path, form: ``data.path`` and ``data.format``.
        key: the field of a row with its text or its messages.
        max_bad: largest share of rows that may be left out.

    Attributes:
        count, bad: number of rows so far, and of those that are left out.
    """

    def __init__(self, path: str, form: str, key: str, max_bad: float) -> None:
        self.count = self.bad = 0
        self._is_stdlib, self._form, self._key, self._max_bad = is_stdlib(path), form, key, max_bad
        self._examples: list[str] = []
        self._remedy = ""

    def texts(self, files: Sequence[Path], *, line_end: str = "\n") -> Iterator[str]:
        """Texts that are not empty and end with ``line_end``. Raises ``UserError``."""
        for file in files:
            for text in self._raw_texts(file):
                if text:
                    yield text if text.endswith(line_end) else text + line_end

    def _raw_texts(self, file: Path) -> Iterator[str]:
        if format_of(file, self._form) == "text":
            yield _read_text(file)
            return
        for place, value in self._values(file):
            if not isinstance(value, str):
                remedy = "set data.text_key to the field with the text"
                self.leave_out(place, BadRow(f"has no text under {self._key!r}", remedy))
            elif not _is_unicode(value):
                self.leave_out(place, _NOT_UNICODE)
            else:
                yield value

    def conversations(self, files: Sequence[Path]) -> Iterator[tuple[str, Messages]]:
        """Conversations with at least one answer, each with its place. Raises ``UserError``."""
        for file in files:
            for place, value in self._documented(file) if self._is_stdlib else self._values(file):
                problem = _problem_of_messages(value, self._key)
                if problem is not None:
                    self.leave_out(place, problem)
                else:
                    yield place, cast(Messages, value)

    def leave_out(self, place: str, bad: BadRow) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        if len(self._examples) < _EXAMPLES:
            self._examples.append(f"{place} {bad.why}")
        self._remedy = self._remedy or bad.remedy

    def note(self) -> str:
        """After the last row: what was left out; empty if nothing was. Raises ``UserError``: it is too much."""
        if self.bad > self._max_bad * self.count:
            allowed = f"data.bad_rows = {self._max_bad:g} allows {int(self._max_bad * self.count):,}"
            text = f"{self._examples[0]}; {self.bad:,} of {self.count:,} rows cannot be used, and {allowed}"
            raise UserError(text, remedy=f"{self._remedy}; or raise data.bad_rows")
        if not self.bad:
            return ""
        more = f"; and {self.bad - _EXAMPLES:,} more" if self.bad > _EXAMPLES else ""
        return f"{self.bad:,} of {self.count:,} rows of the data are left out: {'; '.join(self._examples)}{more}"

    def _values(self, file: Path) -> Iterator[tuple[str, object]]:
        """The place of each row, and its value under the key; bad rows are counted."""
        readers = {"jsonl": _jsonl_values, "csv": _csv_values, "parquet": _parquet_values}
        for number, value in readers[format_of(file, self._form)](file, self._key):
            self.count += 1
            if isinstance(value, BadRow):
                self.leave_out(f"{file}:{number}", value)
            else:
                yield f"{file}:{number}", value

    def _documented(self, file: Path) -> Iterator[tuple[str, object]]:
        """Questions and answers of one of the standard library's sources: for each public module, class and function
        that has a docstring, what it is or does, and the docstring's first paragraph. Nothing is imported."""
        root = Path(sysconfig.get_path("stdlib"))
        names = [name for name in file.relative_to(root).with_suffix("").parts if name != "__init__"]
        if any(name.startswith("_") for name in names):
            return
        try:
            tree = ast.parse(_read_text(file))
        except (SyntaxError, ValueError, RecursionError):
            self.count += 1
            self.leave_out(str(file), BadRow("is not Python", "set data.path to a file of your own"))
            return
        for messages in _questions(tree, ".".join(names)):
            self.count += 1
            yield str(file), messages


def _read_text(file: Path, errors: str = "strict") -> str:
    """``errors``: as of ``bytes.decode``. With ``surrogateescape`` a wrong byte spoils its row, not the file."""
    try:
        data = _unpack(file) if kind_of(file)[1] else file.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"cannot read {file}: {error}", remedy="it is no whole gzip file: make it anew") from error
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        text = data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text (byte {error.start})", remedy="convert it with iconv -t UTF-8, or leave it out"
        ) from error
    if errors == "strict" and "\0" in text:
        raise UserError(f"{file} is not text: byte {text.index(chr(0))} is zero", remedy="leave it out of data.path")
    return text.replace("\r\n", "\n")


def _unpack(file: Path) -> bytes:
    """A few bytes may become any number, so memory is checked while they do."""
    data = bytearray()
    with gzip.open(file) as stream:
        while part := stream.read(_PART_BYTES):
            data += part
            remedy = "unpack it, and cut it into smaller files"
            check_memory(3 * len(data), HOST, f"{file} ({human_bytes(len(data))} unpacked so far)", remedy)
    return bytes(data)


# ----------------------------------------------------------------------------------------------------- values of rows


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem_of_messages(value: object, key: str) -> BadRow | None:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        remedy = "set data.text_key to the field with a list of {role, content}"
        return BadRow(f"has no list of 1 to {MAX_MESSAGES:,} messages under {key!r}", remedy)
    for number, message in enumerate(value, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            remedy = f"a message is {{role, content}}: a role is one of {', '.join(ROLES)}, and a content is text"
            return BadRow(f"has no such role or no text in message {number}", remedy)
        if not _is_unicode(content):
            return _NOT_UNICODE
        if message.get("weight") not in (None, 0, 1):
            remedy = "an answer of weight 0 is not learned, others are"
            return BadRow(f"has the weight {message['weight']!r:.20}, not 0 or 1, in message {number}", remedy)
    if value[0]["role"] == "assistant" or all(message["role"] != "assistant" for message in value):
        return BadRow("has no question with an answer of the assistant", "only answers are learned: leave the row out")
    return None


def _jsonl_values(file: Path, key: str) -> Iterator[tuple[int, object]]:
    text = _read_text(file, "surrogateescape")
    if text[:100].lstrip().startswith("["):  # one array, rather than a row in each line
        check_memory(16 * len(text), HOST, f"the array in {file}", "write a row in each line, as .jsonl")
        try:
            records = json.loads(text)
        except (ValueError, RecursionError):
            records = []
        for number, record in enumerate(records, start=1):
            yield number, record.get(key) if isinstance(record, dict) else None
        if records:
            return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield number, BadRow("is not JSON", "each line is one JSON object, or the file is one array of them")
        else:
            yield number, record.get(key) if isinstance(record, dict) else None


def _csv_values(file: Path, key: str) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    # Strict: otherwise a quote that is not closed would make one text of the rest of the file.
    delimiter = "\t" if kind_of(file)[0] == ".tsv" else ","
    lines = (found[0] for found in _CSV_LINE.finditer(_read_text(file, "surrogateescape")))
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    column = -1
    while True:
        number = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "limit" in str(error):  # what follows would be read from inside the field
                text = f"{file}:{number} has a field of more than {_MAX_FIELD_CHARACTERS:,} characters"
                raise UserError(text, remedy="write long texts as .jsonl, or close the quote") from error
            yield number, BadRow(f"is not CSV ({error})", "quote fields with a comma, a quote or a line end in them")
            continue
        if record is None:
            return
        if column < 0:
            column = _find_column(file, record, key)
        elif record:
            value = record[column] if column < len(record) else None
            yield number, BadRow("has a zero byte", "leave it out") if value and "\0" in value else value


def _parquet_values(file: Path, key: str) -> Iterator[tuple[int, object]]:
    import pyarrow  # an optional package; ``find_files`` has checked that it is installed
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(file) as table:
            _find_column(file, table.schema_arrow.names, key)
            groups = (table.metadata.row_group(index) for index in range(table.num_row_groups))
            columns = (group.column(index) for group in groups for index in range(group.num_columns))
            named = [column for column in columns if column.path_in_schema.partition(".")[0] == key]
            size_bytes = sum(column.total_uncompressed_size for column in named)
            what = f"reading {human_bytes(size_bytes)} of {file}"
            check_memory(3 * size_bytes, HOST, what, "cut it into smaller files")
            for batch in table.iter_batches(batch_size=256, columns=[key]):
                for scalar in batch.column(0):
                    number += 1
                    try:
                        yield number, scalar.as_py()
                    except (ValueError, OverflowError):
                        yield number, BadRow("holds a value that cannot be read, perhaps not UTF-8", "write it anew")
    except (pyarrow.ArrowException, OSError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        where = f" after row {number}" if number else ""
        raise UserError(f"cannot read {file}{where}: {text[0][:300]}", remedy="is it a whole Parquet file?") from error


def _find_column(file: Path, names: Sequence[str], key: str) -> int:
    if key not in names:
        there = shortened(", ".join(map(repr, names)), 300)
        raise ConfigError(
            f"{file} has no column {key!r}; it has {there}",
            remedy="set data.text_key to one of them, or data.format = 'text'",
        )
    return list(names).index(key)


def _questions(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Messages]:
    answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if answer:
        question = f"What does {name} do?" if is_function else f"What is {name}?"
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for child in () if is_function else node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from _questions(child, f"{name}.{child.name}")
