"""What the files of a corpus hold: texts, and rows with a text, a conversation or a pair of answers. Rows that cannot
be used are counted.

A *row* is a line of a ``.jsonl`` file or an item of a JSON array, a record of a ``.csv`` or ``.tsv`` file (its first
record names the columns) or a row of a ``.parquet`` file. Files may be compressed with gzip. Which rows are left out
depends on the files alone, so members with equal files keep equal corpora.

Files are read in parts, so memory does not grow with them. It is checked for what must be held whole: a line, a JSON
array, a row group of a ``.parquet`` file.
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from p2ptrain.compute.device import HOST, check_memory
from p2ptrain.core import plugins
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import format_of, is_stdlib, kind_of, unreadable
from p2ptrain.core.texts import human_bytes, shortened

T = TypeVar("T")
Messages = list[dict[str, Any]]
"""A conversation: each message has a ``role`` and a ``content``, and an answer that is not learned the ``weight`` 0."""

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 1024
_EXAMPLES = 3  # bad rows that a warning names
_PART_BYTES = 1 << 20
_LONG_CHARS = 1 << 24  # memory is checked for longer lines
_MAX_FIELD_CHARACTERS = 1 << 24  # of a .csv: Python's reader takes up to 13 bytes for each
_LINE, _CSV_LINE = re.compile(r"[^\n]*\n|[^\n]+"), re.compile(r"[^\r\n]*[\r\n]|[^\r\n]+")


class BadRow(UserError):
    """A row cannot be used. The message follows its place."""


RowValues = Sequence[Any] | BadRow
"""What a row has under the keys that are read."""


class TextPart(NamedTuple):
    """A part of a text. ``ends``: the text, a file or a row, ends with it."""

    text: str
    ends: bool


@dataclass(slots=True)
class RowCounts:
    """Number of rows so far, and of those that are left out; of the first of these, the places and reasons."""

    count: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    remedy: str = ""

    def leave_out(self, place: str, problem: UserError) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        if len(self.examples) < _EXAMPLES:
            is_bad = "" if isinstance(problem, BadRow) else "is not usable: "
            self.examples.append(f"{place} {is_bad}{problem.message}")
        self.remedy = self.remedy or problem.remedy or "leave it out"

    def note(self, max_bad: float) -> str:
        """After the last row: what was left out; empty if nothing was. Raises ``UserError``: it is more than the share
        ``max_bad``."""
        if self.bad > max_bad * self.count:
            allowed = f"data.bad_rows = {max_bad:g} allows {int(max_bad * self.count):,}"
            text = f"{self.examples[0]}; {self.bad:,} of {self.count:,} rows cannot be used, and {allowed}"
            raise UserError(text, remedy=f"{self.remedy}; or raise data.bad_rows")
        if not self.bad:
            return ""
        more = f"; and {self.bad - _EXAMPLES:,} more" if self.bad > _EXAMPLES else ""
        return f"{self.bad:,} of {self.count:,} rows of the data are left out: {'; '.join(self.examples)}{more}"


class Rows:
    """Reads files in order.

    Args:
        path, form, key: ``data.path``, ``data.format`` and ``data.text_key``.
        settings: of the plugin that ``form`` names.

    Attributes:
        read_bytes: of the files on disk, so far. text_bytes: of the UTF-8 of the texts that were taken.
    """

    def __init__(self, path: str, form: str, key: str, settings: Mapping[str, object] | None = None) -> None:
        self._settings = settings or {}
        self.counts, self.read_bytes, self.text_bytes = RowCounts(), 0, 0
        self._form, self._is_documentation = form, is_stdlib(path) and form == "chat"
        self._keys, self._check = _KINDS.get(form, (("text",), _check_texts))
        self._keys = (key,) if key and len(self._keys) == 1 else self._keys

    def state(self) -> dict[str, Any]:
        """For ``made_of_rows``, as JSON."""
        return {"counts": asdict(self.counts), "text_bytes": self.text_bytes}

    def made_of_rows(
        self, files: Sequence[Path], make: Callable[[Sequence[Any]], T], state: Mapping[str, Any] | None = None
    ) -> Iterator[T]:
        """What ``make`` makes of the values of each row: a text, a conversation, or a prompt and two answers, texts or
        messages. Raises ``UserError``. ``state``: go on behind the row where ``state()`` was made.

        ``make`` may refuse a row by ``UserError``. Its ``ConfigError`` is raised: what this machine lacks must not
        decide which rows are learned."""
        found = ((file, *row) for file in files for row in self._values(file))
        if state:
            self.counts, self.text_bytes = RowCounts(**state["counts"]), state["text_bytes"]
            for _ in islice(found, self.counts.count):
                pass
        for file, number, values in found:
            self.counts.count += 1
            try:
                if isinstance(values, BadRow):
                    raise values
                self._check(values, self._keys[0])
                made = make(values)
            except ConfigError:
                raise
            except UserError as problem:
                self.counts.leave_out(f"{file}:{number}" if number else str(file), problem)
            else:
                yield made

    def texts(self, files: Sequence[Path], *, line_end: str = "\n", limit_bytes: int = 0) -> Iterator[TextPart]:
        """Texts that are not empty, in parts; each text ends with ``line_end``. Raises ``UserError``.

        ``limit_bytes``: of UTF-8, where the last text is cut, between characters; 0: no limit."""
        for text, ends in self._whole_texts(files, line_end):
            encoded = text.encode()
            if limit_bytes and self.text_bytes + len(encoded) >= limit_bytes:
                kept = encoded[: limit_bytes - self.text_bytes].decode(errors="ignore")
                self.text_bytes = limit_bytes
                yield TextPart(kept, ends=True)
                return
            self.text_bytes += len(encoded)
            yield TextPart(text, ends)

    def _whole_texts(self, files: Sequence[Path], line_end: str) -> Iterator[TextPart]:
        for file in files:
            before = ""
            for text, ends in self._raw_texts(file):
                before = text or before
                if ends and before:
                    yield TextPart(text if before.endswith(line_end) else text + line_end, ends=True)
                    before = ""
                elif text:
                    yield TextPart(text, ends=False)

    def _raw_texts(self, file: Path) -> Iterator[TextPart]:
        if format_of(file, self._form) == "text":
            yield from (TextPart(part, ends=False) for part in self._parts(file))
            yield TextPart("", ends=True)
        else:
            yield from self.made_of_rows([file], lambda values: TextPart(values[0], ends=True))

    def _values(self, file: Path) -> Iterator[tuple[int, RowValues]]:
        """The number of each row, 0 if a file is no list of them, and its values."""
        if self._is_documentation:
            return self._documented(file)
        match format_of(file, self._form):
            case "jsonl":
                return _jsonl_values(file, self._parts(file, "surrogateescape"), self._keys)
            case "csv":
                return _csv_values(file, self._parts(file, "surrogateescape"), self._keys)
            case "parquet":
                return self._parquet_values(file)
            case name:
                return self._plugin_values(file, name)

    def _documented(self, file: Path) -> Iterator[tuple[int, RowValues]]:
        """Questions and answers of one of the standard library's sources: for each public module, class and function
        that has a docstring, what it is or does, and the docstring's first paragraph. Nothing is imported."""
        root = Path(sysconfig.get_path("stdlib"))
        names = [name for name in file.relative_to(root).with_suffix("").parts if name != "__init__"]
        if any(name.startswith("_") for name in names):
            return
        try:
            tree = ast.parse("".join(self._parts(file)))
        except (SyntaxError, ValueError, RecursionError):
            yield 0, BadRow("is not Python", remedy="set data.path to a file of your own")
            return
        for messages in _questions(tree, ".".join(names)):
            yield 0, [messages]

    def _parts(self, file: Path, errors: str = "strict") -> Iterator[str]:
        """The text of a file in parts of about ``_PART_BYTES``, none of which ends between ``\\r`` and ``\\n``.

        ``errors``: as of ``bytes.decode``. With ``surrogateescape`` a wrong byte spoils its row, not the file."""
        decoder, read_before = codecs.getincrementaldecoder("utf-8")(errors), self.read_bytes
        place, held, begun = 0, "", False  # bytes before this part; a ``\\r`` of the one before it
        with _file_errors(file), file.open("rb") as packed, _unpacked(file, packed) as stream:
            while True:
                data, waiting = stream.read(_PART_BYTES), len(decoder.getstate()[0])
                try:
                    text = held + decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at, remedy = place - waiting + error.start, "convert it with iconv -t UTF-8, or leave it out"
                    raise UserError(f"{file} is not UTF-8 text (byte {at})", remedy=remedy) from error
                if errors == "strict" and b"\0" in data:
                    text = f"{file} is not text: byte {place + data.index(0)} is zero"
                    raise UserError(text, remedy="leave it out of data.path")
                place, self.read_bytes = place + len(data), read_before + packed.tell()
                text = text if begun else text.removeprefix("\ufeff")
                begun, held = True, "\r" if data and text.endswith("\r") else ""
                yield text.removesuffix(held).replace("\r\n", "\n")
                if not data:
                    return

    def _plugin_values(self, file: Path, name: str) -> Iterator[tuple[int, RowValues]]:
        key, read_before = f"readers:{name}", self.read_bytes
        reader = plugins.make(key, object, self._settings)
        with plugins.blamed(key, f" with {file}"), _file_errors(file), file.open("rb") as packed:
            for number, text in enumerate(reader.texts(_unpacked(file, packed)), start=1):
                self.read_bytes = read_before + packed.tell()
                yield number, [text] if isinstance(text, str) else BadRow("cannot be used")

    def _parquet_values(self, file: Path) -> Iterator[tuple[int, RowValues]]:
        import pyarrow  # an optional package; ``find_files`` has checked that it is installed
        from pyarrow.parquet import ParquetFile

        number, read_before, keys = 0, self.read_bytes, list(self._keys)
        try:
            with ParquetFile(file) as table:
                _find_columns(file, table.schema_arrow.names, keys)
                for index in range(table.num_row_groups):
                    group = table.metadata.row_group(index)
                    columns = [group.column(column) for column in range(group.num_columns)]
                    named = [column for column in columns if column.path_in_schema.partition(".")[0] in keys]
                    size_bytes = sum(column.total_uncompressed_size for column in named)
                    what = f"reading {human_bytes(size_bytes)} of {file}"
                    check_memory(3 * size_bytes, HOST, what, "write it anew with smaller row groups")
                    for batch in table.iter_batches(batch_size=256, row_groups=[index], columns=keys):
                        for scalars in zip(*(batch.column(key) for key in keys), strict=True):
                            number += 1
                            try:
                                yield number, [scalar.as_py() for scalar in scalars]
                            except (ValueError, OverflowError):
                                why = "holds a value that cannot be read, perhaps not UTF-8"
                                yield number, BadRow(why, remedy="write it anew")
                    self.read_bytes = read_before + file.stat().st_size * (index + 1) // table.num_row_groups
        except (pyarrow.ArrowException, OSError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            where = f" after row {number}" if number else ""
            problem = f"cannot read {file}{where}: {text[0][:300]}"
            raise UserError(problem, remedy="is it a whole Parquet file?") from error


@contextmanager
def _file_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"cannot read {file}: {error}", remedy="it is no whole gzip file: make it anew") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _unpacked(file: Path, packed: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=packed)) if kind_of(file)[1] else packed


def _lines(file: Path, parts: Iterator[str], line: re.Pattern[str], ends: str) -> Iterator[str]:
    """The lines of a file, each with its end. A few bytes may be unpacked to any number, so memory is checked."""
    held: list[str] = []
    for part in parts:
        for text in line.findall(part):
            held.append(text)
            if text[-1] in ends:
                yield "".join(held)
                held.clear()
        if (chars := sum(map(len, held))) > _LONG_CHARS:
            remedy = "unpack it, and write the text in more lines"
            check_memory(3 * chars, HOST, f"a line of {file} ({human_bytes(chars)} so far)", remedy)
    if held:
        yield "".join(held)


# ----------------------------------------------------------------------------------------------------- values of rows


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = "has a byte that is not UTF-8, or half of a surrogate pair"
        raise BadRow(why, remedy="write the text as UTF-8") from error


def _check_texts(values: Sequence[Any], key: str) -> None:
    for value in values:
        if not isinstance(value, str):
            raise BadRow(f"has no text under {key!r}", remedy="set data.text_key to the field with the text")
        _check_unicode(value)


def _check_pair(values: Sequence[Any], key: str) -> None:
    prompt, *answers = values
    if all(isinstance(value, str) for value in values):
        _check_texts(values, key)
    elif all(isinstance(value, list) for value in values):
        for answer in answers:
            _check_messages([[*prompt, *answer]], key)
    else:
        remedy = "give each row prompt, chosen and rejected: three texts, or three lists of {role, content}"
        raise BadRow("is no pair of answers", remedy=remedy)


def _check_messages(values: Sequence[Any], key: str) -> None:
    (value,) = values
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        remedy = "set data.text_key to the field with a list of {role, content}"
        raise BadRow(f"has no list of 1 to {MAX_MESSAGES:,} messages under {key!r}", remedy=remedy)
    for number, message in enumerate(value, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            remedy = f"a message is {{role, content}}: a role is one of {', '.join(ROLES)}, and a content is text"
            raise BadRow(f"has no such role or no text in message {number}", remedy=remedy)
        _check_unicode(content)
        if message.get("weight") not in (None, 0, 1):
            why = f"has the weight {message['weight']!r:.20}, not 0 or 1, in message {number}"
            raise BadRow(why, remedy="an answer of weight 0 is not learned, others are")
    if value[0]["role"] == "assistant" or all(message["role"] != "assistant" for message in value):
        why = "has no question with an answer of the assistant"
        raise BadRow(why, remedy="only answers are learned: leave the row out")


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Any], str], None]]] = {
    "chat": (("messages",), _check_messages),
    "preference": (("prompt", "chosen", "rejected"), _check_pair),
}
"""By ``data.format``, the usual fields of a row, and the check of their values; for others it is one text."""


def _jsonl_values(file: Path, parts: Iterator[str], keys: Sequence[str]) -> Iterator[tuple[int, RowValues]]:
    def values(record: object) -> list[object]:
        return [record.get(key) if isinstance(record, dict) else None for key in keys]

    first = next(parts)
    if first[:100].lstrip().startswith("["):  # one array, rather than a row in each line
        whole = [first]
        for part in parts:
            whole.append(part)
            size_bytes = 16 * sum(map(len, whole))
            check_memory(size_bytes, HOST, f"the array in {file}", "write a row in each line, as .jsonl")
        first = "".join(whole)
        try:
            records = json.loads(first)
        except (ValueError, RecursionError):
            records = []
        for number, record in enumerate(records, start=1):
            yield number, values(record)
        if records:
            return
    for number, line in enumerate(_lines(file, chain([first], parts), _LINE, "\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield number, BadRow("is not JSON", remedy="each line is one JSON object, or the file is one array of them")
        else:
            yield number, values(record)


def _csv_values(file: Path, parts: Iterator[str], keys: Sequence[str]) -> Iterator[tuple[int, RowValues]]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    # Strict: otherwise a quote that is not closed would make one text of the rest of the file.
    delimiter = "\t" if kind_of(file)[0] == ".tsv" else ","
    reader = csv.reader(_lines(file, parts, _CSV_LINE, "\r\n"), strict=True, delimiter=delimiter)
    columns: list[int] = []
    while True:
        number = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "limit" in str(error):  # what follows would be read from inside the field
                text = f"{file}:{number} has a field of more than {_MAX_FIELD_CHARACTERS:,} characters"
                raise UserError(text, remedy="write long texts as .jsonl, or close the quote") from error
            yield (
                number,
                BadRow(f"is not CSV ({error})", remedy="quote fields with a comma, a quote or a line end in them"),
            )
            continue
        if record is None:
            return
        if not columns:
            columns = _find_columns(file, record, keys)
        elif record:
            values = [record[column] if column < len(record) else None for column in columns]
            yield (
                number,
                BadRow("has a zero byte", remedy="leave it out") if "\0" in "".join(filter(None, values)) else values,
            )


def _find_columns(file: Path, names: Sequence[str], keys: Sequence[str]) -> list[int]:
    for key in keys:
        if key not in names:
            there = shortened(", ".join(map(repr, names)), 300)
            remedy = "set data.text_key to one of them, or data.format = 'text'"
            raise ConfigError(f"{file} has no column {key!r}; it has {there}", remedy=remedy)
    return [list(names).index(key) for key in keys]


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
