"""``p2ptrain generate``: writes a text for each prompt.

Several texts are written at a time. They are printed in the order of the prompts: the first unfinished one as it
arrives, the others once it is their turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import failure, print_json
from p2ptrain.cli.runtime import WithBareSplit, is_text, option, run, takes_options
from p2ptrain.cli.text_options import TextOptions, TokensOption, write
from p2ptrain.cluster.console import Console, stop_on_signals, unless_stopped
from p2ptrain.core.errors import EXIT_INTERRUPTED, P2PTrainError, UserError, first_error

if TYPE_CHECKING:
    from p2ptrain.cli.text import Answer, TextSource
    from p2ptrain.compute.text import ModelText

STDIN = "-"
_USUAL_SESSIONS = 4
PROMPTS_BYTES = 1 << 24  # a larger file is most likely not a file of prompts

app = new_typer()


@app.command("generate", cls=WithBareSplit)
@takes_options(TextOptions)
def generate(
    prompt: Annotated[
        str,
        typer.Argument(metavar="[PROMPT]", callback=is_text, help="Text to continue; -: all of standard input."),
    ] = "",
    prompts: Annotated[str, option("--prompts FILE", "File of prompts, one per line; -: standard input.")] = "",
    max_new_tokens: TokensOption = 200,
    sessions: Annotated[int, option("--sessions N", "Prompts processed at once; 0: automatic.", min=0, max=8)] = 0,
    *,
    options: TextOptions,
) -> None:
    """Write text with a checkpoint, or with a verifier of the cluster, and print it as it arrives.

    Without --checkpoint and --job a verifier writes (p2ptrain join --role verifier). The text is that of its model. The
    more often its drafters are right, the sooner it arrives.

    Without --temperature, --top-k and --top-p the model's generation_config.json decides, as in transformers: greedy
    decoding, unless it sets do_sample. Each of these options overrides the file.

    With --split, workers that joined the seed compute the model; each holds some layers, none holds all. The files of
    --checkpoint are on this machine; workers that do not have the same directory receive them. Those of --job may be
    on any worker. The text is
    that of the whole model, greedy and sampled, if hidden states travel as computed (no --wire).

    \b
    Examples:
      p2ptrain generate "Once upon a time" --stats
      p2ptrain generate --prompts prompts.txt --no-speculation --json --seed 192.168.1.20
      p2ptrain generate "def main(" --checkpoint ./step-00000400
      p2ptrain generate "import " --job tiny --temperature 0 --tokens 80
      p2ptrain generate "def f(x):" -c ./step-00000400 --stop "\\ndef " --stop "\\nclass "
      p2ptrain generate --prompts prompts.txt -c ./step-00000400 --json
      git diff | p2ptrain generate - -c ./step-00000400
      p2ptrain generate "Once upon a time" --split -c ./Llama-3.1-8B --dtype bf16 --dry-run
      p2ptrain generate "Once upon a time" --split 3 -c ./Llama-3.1-8B --dtype bf16 --stats
      p2ptrain generate --prompts prompts.txt --sessions 4 --split --job tiny --json
    """
    asked = _read_prompts(prompt, prompts)
    options.check("generate")

    with Console(quiet=options.as_json).during(lambda: "starting"):
        from p2ptrain.cli.text import local_directory

    request = GenerateRequest(asked, max_new_tokens, min(sessions or _USUAL_SESSIONS, len(asked)), options)
    run(_generate(request, local_directory(options)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue. ``place``: the line of its file; empty: it is the only one, an argument of the command."""

    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to write. ``at_once``: texts at a time."""

    prompts: list[Prompt]
    max_new_tokens: int
    at_once: int
    options: TextOptions

    def check(self, text: ModelText) -> int:
        """Refuse invalid prompts before anything is loaded. Returns the positions of all texts that run at a time."""
        lengths = list[int]()
        text.sampling(self.options.sampling)
        for prompt in self.prompts:
            try:
                length = len(text.prompt_ids(prompt.text))
                text.check_length(length, self.max_new_tokens)
                lengths.append(length)
            except UserError as error:
                if not prompt.place:
                    raise
                raise UserError(f"{prompt.place}: {error.message}", remedy=error.remedy) from error
        return self.at_once * (max(lengths) + self.max_new_tokens)


async def _generate(request: GenerateRequest, directory: Path | None) -> None:
    from p2ptrain.cli.text import text_source

    console, stop, quiet = Console(quiet=request.options.as_json), asyncio.Event(), request.options.as_json
    printer = TextPrinter(quiet=quiet)

    def leave(text: str) -> None:
        printer.quiet = True
        with suppress(BrokenPipeError):  # the reader may have closed the pipe
            printer.end_line()
        console.event("info", text)

    async def work() -> bool:
        async with text_source(request.options, directory, request.check, console) as source:
            if source is not None:
                await GeneratedTexts(source, request, printer).write()
        return True

    stop_on_signals(stop, leave)
    if await unless_stopped(stop, work()) is None:
        raise KeyboardInterrupt


class TextPrinter:
    """Prints texts one after the other, each behind its prompt."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._printed_texts = 0
        self._is_in_line = False

    def begin(self, prompt: str) -> None:
        apart = "\n" if sys.stdout.isatty() else "\n\n"  # `end_line` has ended the line on a terminal
        self.print(apart * bool(self._printed_texts) + prompt)
        self._printed_texts += 1

    def print(self, text: str) -> None:
        if not self.quiet:
            write(text)
            self._is_in_line = True

    def end_line(self) -> None:
        """Begin a new line for whatever is printed next. What reads a pipe gets the text and no newline more."""
        was_in_line, self._is_in_line = self._is_in_line, False
        if was_in_line and sys.stdout.isatty():
            typer.echo()


class GeneratedTexts:
    """Writes the texts of a request, and prints them and their figures.

    Attributes:
        answers: by the prompt's index. Those that go on, and those that broke off, have ``ended == "failed"``.
    """

    def __init__(self, source: TextSource, request: GenerateRequest, printer: TextPrinter) -> None:
        self.answers: dict[int, Answer] = {}
        self._source, self._request, self._printer = source, request, printer
        self._stats: dict[int, dict[str, Any]] = {}
        self._index = 0  # of the text that is printed
        self._printed = -1  # its printed letters; -1: not even its prompt, so that an earlier error stands alone

    async def write(self) -> None:
        """Write all texts. Raises the error of the first text that failed; before it, programs get what there is."""
        began = time.perf_counter()
        try:
            await self._write_all()
        except (P2PTrainError, asyncio.CancelledError) as problem:
            self._printer.end_line()
            if self._request.options.as_json and self.answers:
                interrupted = P2PTrainError("interrupted")
                interrupted.exit_code = EXIT_INTERRUPTED
                error = failure(problem if isinstance(problem, P2PTrainError) else interrupted)
                print_json(self._document() | {"error": error})
            raise
        self._print_figures(time.perf_counter() - began)

    async def _write_all(self) -> None:
        indices = iter(range(len(self._request.prompts)))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._request.at_once):
                    tasks.create_task(self._write_texts(indices), name=f"text {number}")
        except* (P2PTrainError, OSError) as group:  # OSError: the output is full, or its reader has closed the pipe
            raise first_error(group) from None

    async def _write_texts(self, indices: Iterator[int]) -> None:
        """Write one text after the other. ``indices``: of those that are left; all tasks take from it."""
        from p2ptrain.cli.text import Answer

        for index in indices:
            prompt = self._request.prompts[index].text
            request = self._request.options.request(self._request.max_new_tokens, prompt=prompt)
            answer, began = Answer(request.prompt), time.perf_counter()
            writing = await self._source.service.write(request)
            self.answers[index] = answer
            try:
                async for piece in writing:
                    answer.take(piece, time.perf_counter() - began)
                    self._print_news()
                answer.ended, self._stats[index] = writing.ended, writing.stats()
            finally:
                await writing.close()
            self._print_news()

    def _print_news(self) -> None:
        """Print what is there and not printed yet, up to the end of the first text that goes on."""
        while (answer := self.answers.get(self._index)) is not None and (answer.text or answer.ended != "failed"):
            if self._printed < 0:
                self._printer.begin(answer.prompt)
                self._printed = 0
            self._printer.print(answer.text[self._printed :])
            self._printed = len(answer.text)
            if answer.ended == "failed":
                return
            self._printer.end_line()
            self._index, self._printed = self._index + 1, -1

    def _document(self) -> dict[str, Any]:
        prompts = self._request.prompts
        texts = [
            asdict(self.answers[index]) | {"stats": self._stats.get(index, {})} if index in self.answers else None
            for index in range(len(prompts))
        ]
        return self._source.identity | ({"texts": texts} if prompts[0].place else texts[0] or {})

    def _print_figures(self, seconds: float) -> None:
        options = self._request.options
        if options.as_json:
            print_json(self._document() | self._source.facts())
            return
        if options.stats:
            self._source.show_stats([self._stats[index] for index in sorted(self._stats)])
        tokens = sum(answer.tokens for answer in self.answers.values())
        speed = f"{tokens / max(seconds, 1e-9):.1f} tokens/s"
        typer.echo(f"({tokens} token{'s' if tokens != 1 else ''}, {speed}, {self._source.label})", err=True)


def _read_prompts(prompt: str, file: str) -> list[Prompt]:
    if bool(prompt) == bool(file):
        raise UserError("generate needs a prompt", remedy="give either a PROMPT or --prompts FILE")
    if prompt and prompt != STDIN:
        return [Prompt(prompt)]
    name = "standard input" if (file or STDIN) == STDIN else file
    content = _read_text(file or STDIN, name)
    lines = [
        Prompt(line.removesuffix("\r"), f"line {number} of {name}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise UserError(f"{name} holds no prompt", remedy="write one per line" if file else "")
    return lines if file else [Prompt(content)]


def _read_text(file: str, name: str) -> str:
    try:
        if file == STDIN:
            raw = sys.stdin.buffer.read(PROMPTS_BYTES + 1)
        else:
            with Path(file).open("rb") as handle:
                raw = handle.read(PROMPTS_BYTES + 1)
        if len(raw) > PROMPTS_BYTES:
            raise UserError(f"{name} has more than {PROMPTS_BYTES >> 20} MiB", remedy="is it the right file?")
        return raw.decode()
    except OSError as error:
        text = f"cannot read {name}: {error.strerror}"
        raise UserError(text, remedy="name a text file with one prompt per line") from error
    except UnicodeDecodeError as error:
        text = f"{name} is not UTF-8 text (byte {error.start})"
        raise UserError(text, remedy="convert it with iconv -t UTF-8") from error
