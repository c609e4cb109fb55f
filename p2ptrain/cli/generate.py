"""``p2ptrain generate``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import failure, print_json
from p2ptrain.cli.runtime import WithBareSplit, is_text, option, run, takes_options
from p2ptrain.cli.text_options import TextOptions, TokensOption, write
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import P2PTrainError, UserError, first_error

if TYPE_CHECKING:
    from p2ptrain.cli.text import Answer, TextSource
    from p2ptrain.compute.text import ModelText

STDIN = "-"
PROMPTS_BYTES = 1 << 24  # a larger file is most likely not a file of prompts

app = new_typer()


@app.command("generate", cls=WithBareSplit)
@takes_options(TextOptions)
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="[PROMPT]", callback=is_text, help="Text to continue; -: all of standard input.")
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
    asked = _prompts(prompt, prompts)
    options.check("generate")

    with Console(quiet=options.as_json).during(lambda: "starting"):
        from p2ptrain.cli.text import local_directory

    usual = 4 if options.by_verifier or options.split is not None else 1  # a whole model writes one text at a time
    request = GenerateRequest(asked, bool(prompt), max_new_tokens, min(sessions or usual, len(asked)), options)
    run(_generate(request, local_directory(options)))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to write. ``is_one``: the prompt was an argument, not a list of one."""

    prompts: list[str]
    is_one: bool
    max_new_tokens: int
    at_once: int
    options: TextOptions

    def check(self, text: ModelText) -> int:
        """Refuse invalid prompts before anything is loaded. Returns the positions of all texts that run at a time."""
        lengths = list[int]()
        text.sampling(self.options.sampling)
        for number, prompt in enumerate(self.prompts, start=1):
            try:
                lengths.append(len(text.checked(text.prompt_ids(prompt), self.max_new_tokens)))
            except UserError as error:
                if len(self.prompts) == 1:
                    raise
                raise UserError(f"prompt {number}: {error.message}", remedy=error.remedy) from error
        return self.at_once * (max(lengths) + self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class FinishedText:
    """A text and its figures."""

    answer: Answer
    stats: dict[str, Any] = field(default_factory=dict)

    def as_map(self) -> dict[str, Any]:
        return asdict(self.answer) | {"stats": self.stats}


async def _generate(request: GenerateRequest, directory: Path | None) -> None:
    from p2ptrain.cli.text import Needs, text_source
    from p2ptrain.cluster.stopping import stop_on_signals, unless_stopped

    console, stop = Console(quiet=request.options.as_json), asyncio.Event()
    shown = Shown(quiet=request.options.as_json)
    stop_on_signals(stop, shown.leaving(console))

    async def work() -> bool:
        needs = Needs(0, request.check)
        async with text_source(request.options, directory, needs, console) as source:
            if source is not None:
                await Texts(source, request, shown).write()
        return True

    if await unless_stopped(stop, work()) is None:
        raise KeyboardInterrupt


class Texts:
    """Writes several texts at a time. Prints them in the order of the prompts, the first unfinished one as it arrives.

    Attributes:
        whole: finished texts by index of the prompt. broken: texts that broke off when one failed.
    """

    def __init__(self, source: TextSource, request: GenerateRequest, shown: Shown) -> None:
        self.whole: dict[int, FinishedText] = {}
        self.broken: dict[int, FinishedText] = {}
        self._source, self._request, self._shown = source, request, shown
        self._behind: dict[int, str] = {}  # index → text that is not shown yet
        self._showing = self._next = 0

    async def write(self) -> None:
        """Write all texts, then print their figures. Raises the error of the first text that failed."""
        began = time.perf_counter()
        self._shown.begin(self._request.prompts[0])
        try:
            await self._all()
        except BaseException as problem:
            self._shown.broken()
            if self._request.options.as_json and isinstance(problem, P2PTrainError) and (self.whole or self.broken):
                print_json(self._document() | {"error": failure(problem)})
            raise
        self._tell(time.perf_counter() - began)

    async def _all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._request.at_once):
                    tasks.create_task(self._worker(), name=f"text {number}")
        except* P2PTrainError as group:
            raise first_error(group) from None

    async def _worker(self) -> None:
        while (index := self._next) < len(self._request.prompts):
            self._next += 1
            self.whole[index] = await self._text(index)
            while self._showing in self.whole:  # then show the texts that waited for it
                self._shown.end()
                self._showing += 1
                if self._showing < len(self._request.prompts):
                    self._shown.begin(self._request.prompts[self._showing])
                    if piece := self._behind.pop(self._showing, ""):
                        self._shown.piece(piece)

    async def _text(self, index: int) -> FinishedText:
        from p2ptrain.cli.text import Answer
        from roles.serving.texts import TextRequest

        asked = self._request
        request = TextRequest(
            prompt=asked.prompts[index],
            max_new_tokens=asked.max_new_tokens,
            sampling=asked.options.sampling,
            stop=asked.options.stops,
            speculate=not asked.options.no_speculation,
        )
        answer, began = Answer(request.prompt), time.perf_counter()
        writing = await self._source.service.write(request)
        try:
            async for piece in writing:
                answer.take(piece, time.perf_counter() - began)
                self._piece(index, piece.text)
            answer.ended = writing.ended
        except BaseException:
            self.broken[index] = FinishedText(answer)
            raise
        finally:
            await writing.close()
        return FinishedText(answer, writing.stats())

    def _piece(self, index: int, piece: str) -> None:
        if index == self._showing:
            self._shown.piece(piece)
        else:
            self._behind[index] = self._behind.get(index, "") + piece

    def _document(self) -> dict[str, Any]:
        known = self.broken | self.whole
        maps = [known[index].as_map() if index in known else None for index in range(len(self._request.prompts))]
        return self._source.identity | (maps[0] or {} if self._request.is_one else {"texts": maps})

    def _tell(self, seconds: float) -> None:
        options, texts = self._request.options, [self.whole[index] for index in range(len(self.whole))]
        if options.as_json:
            print_json(self._document() | self._source.facts())
            return
        if options.stats:
            self._source.show_stats([text.stats for text in texts])
        tokens = sum(text.answer.tokens for text in texts)
        speed = f"{tokens / max(seconds, 1e-9):.1f} tokens/s"
        typer.echo(f"({tokens} token{'s' if tokens != 1 else ''}, {speed}, {self._source.label})", err=True)


class Shown:
    """Prints texts one after the other. The first piece prints the prompt, so that an earlier error stands alone."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._prompt = ""
        self._count = 0
        self._is_open = False

    def begin(self, prompt: str) -> None:
        self._prompt = prompt
        self._is_open = False

    def piece(self, text: str) -> None:
        if self._quiet:
            return
        if not self._is_open:
            apart = "\n" if sys.stdout.isatty() else "\n\n"  # `broken` has ended the line on a terminal
            text = apart * bool(self._count) + self._prompt + text
            self._is_open = True
            self._count += 1
        write(text)

    def end(self) -> None:
        self.piece("")  # prints the prompt if no piece arrived
        self.broken()

    def broken(self) -> None:
        """Begin a new line for whatever is printed next."""
        was_open, self._is_open = self._is_open, False
        if was_open and sys.stdout.isatty():  # what reads a pipe gets the text and no newline more
            typer.echo()

    def leaving(self, console: Console) -> Callable[[str], None]:
        """The callback for Ctrl+C: stop printing the text, and print the message below it."""

        def announce(text: str) -> None:
            self._quiet = True
            with suppress(BrokenPipeError):  # the reader may have closed the pipe
                self.broken()
            console.event("info", text)

        return announce


def _prompts(prompt: str, file: str) -> list[str]:
    if bool(prompt) == bool(file):
        raise UserError("generate needs a prompt", remedy="give either a PROMPT or --prompts FILE")
    if prompt and prompt != STDIN:
        return [prompt]
    content = _read(file or STDIN)
    lines = [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
    asked = lines if file else [content]
    if not any(asked):
        raise UserError(f"{_named(file or STDIN)} holds no prompt", remedy="write one per line" if file else "")
    return asked


def _read(file: str) -> str:
    try:
        if file == STDIN:
            raw = sys.stdin.buffer.read(PROMPTS_BYTES + 1)
        else:
            with Path(file).open("rb") as handle:
                raw = handle.read(PROMPTS_BYTES + 1)
        if len(raw) > PROMPTS_BYTES:
            raise UserError(f"{_named(file)} has more than {PROMPTS_BYTES >> 20} MiB", remedy="is it the right file?")
        return raw.decode()
    except OSError as error:
        text = f"cannot read {_named(file)}: {error.strerror}"
        raise UserError(text, remedy="name a text file with one prompt per line") from error
    except UnicodeDecodeError as error:
        text = f"{_named(file)} is not UTF-8 text (byte {error.start})"
        raise UserError(text, remedy="convert it with iconv -t UTF-8") from error


def _named(file: str) -> str:
    return "standard input" if file == STDIN else file
