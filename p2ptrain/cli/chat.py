"""``p2ptrain chat``: a conversation at a terminal, or over a pipe.

The main thread reads questions and writes answers. The text service runs on the event loop of a second thread. So its
connections send heartbeats while the user types, and Ctrl+C works during a computation.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import failure, print_error, print_json
from p2ptrain.cli.runtime import WithBareSplit, is_text, option, takes_options
from p2ptrain.cli.text_options import TextOptions, TokensOption, write
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.core.errors import P2PTrainError, StorageError, UserError

if TYPE_CHECKING:
    from p2ptrain.cli.text import Answer, TextSource
    from p2ptrain.compute.text import ModelText
    from roles.serving.texts import TextPiece, Writing

T = TypeVar("T")

HELP = """\
  /reset       begin a new conversation
  /stats       where a token's time goes
  /save FILE   write the conversation to a file: JSON where its name ends so, else text
  /help        this list
  /quit        leave, as Ctrl+D does
  Ctrl+C cancels an answer; the text so far stays. A line that begins with a space is never a command."""
_LONGEST = 1 << 24  # characters: a longer line is most likely no question

app = new_typer()


@app.command("chat", cls=WithBareSplit)
@takes_options(TextOptions)
def chat(
    system: Annotated[
        str, option("--system TEXT", "System message, before the first question.", callback=is_text)
    ] = "",
    max_new_tokens: TokensOption = 512,
    *,
    options: TextOptions,
) -> None:
    """Talk with a checkpoint, or with a verifier of the cluster.

    Without --checkpoint and --job a verifier answers (p2ptrain join --role verifier). If it is lost, its text so far
    stays on the screen, and the next question dials it again.

    Without --temperature, --top-k and --top-p the model's generation_config.json decides, as in transformers: greedy
    decoding, unless it sets do_sample. Each of these options overrides the file.

    If the tokenizer has a chat template, it formats the turns. Otherwise they are written "User: ..." and "Assistant:
    ...". If the turns no longer fit the model's context, the oldest are dropped, with a message.

    Ctrl+C cancels an answer and keeps the conversation. A second one leaves, as Ctrl+D and /quit do. /help lists the
    commands. Without a terminal each line of standard input is a question or a command, and an error ends the chat.

    With --split, workers that joined the seed compute the model; each holds some layers, none holds all. The files of
    --checkpoint are on this machine and are sent to the workers. The files of --job may be on any worker.

    \b
    Examples:
      p2ptrain chat
      p2ptrain chat --checkpoint ./SmolLM2-135M-Instruct
      p2ptrain chat --job tiny --temperature 0 --system "You are brief."
      echo "What is a ring?" | p2ptrain chat -c ./SmolLM2-135M-Instruct
      p2ptrain chat --split -c ./Llama-3.1-8B-Instruct --dtype bf16 --seed 192.168.1.20
      p2ptrain chat --split 3 --job tiny --dry-run
    """
    options.check("chat")

    with Console(quiet=options.as_json).during(lambda: "starting"):
        from p2ptrain.cli.text import local_directory, text_source
        from p2ptrain.cluster.split_model import conversation_positions

    def check(text: ModelText) -> int:
        text.sampling(options.sampling)
        return options.positions or conversation_positions(text)

    directory = local_directory(options)
    console = Console(quiet=options.as_json)
    thread = ServiceThread("text service")
    try:
        source = thread.enter(text_source(options, directory, check, console, chats=True))
        if source is not None:
            _converse(ChatSession(thread, source, options, system, max_new_tokens), options)
    finally:
        thread.close()


def _converse(session: ChatSession, options: TextOptions) -> None:
    try:
        session.run()
    except P2PTrainError as problem:
        if options.as_json and session.answers:
            print_json(session.document() | {"error": failure(problem)})
        raise
    if options.as_json:
        print_json(session.document())
    elif options.stats and session.answers:
        session.show_stats()


# ---------------------------------------------------------------------------------------------------- the other thread


async def _next_piece(pieces: AsyncIterator[TextPiece]) -> TextPiece | None:
    return await anext(pieces, None)


async def _stats_of(writing: Writing) -> dict[str, Any]:
    return writing.stats()  # on the service's loop, whose clock it reads


# ------------------------------------------------------------------------------------------------- the conversation


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self, thread: ServiceThread, source: TextSource, options: TextOptions, system: str, max_new_tokens: int
    ) -> None:
        from p2ptrain.compute.text import Conversation

        self.conversation = Conversation(system)
        self.answers: list[Answer] = []
        self._thread, self._source, self._options = thread, source, options
        self._max_new_tokens = max_new_tokens
        self._stats: dict[str, Any] = {}
        self._at_terminal = sys.stdin.isatty()
        self._waiting = Console(quiet=options.as_json or not (self._at_terminal and sys.stderr.isatty()))
        self._left_out = 0  # turns that no longer fit with the last question
        self._saved: set[Path] = set()

    def run(self) -> None:
        """Converse until the user leaves or the input ends. At a terminal an error is printed, and the loop goes on.

        Raises:
            P2PTrainError: without a terminal: the user made a mistake, or the model failed.
            KeyboardInterrupt: Ctrl+C without a terminal.
        """
        self._print_note(f"{self._source.label}: {self._source.about}. /help lists commands")
        for line in self._typed_lines() if self._at_terminal else self._piped_lines():
            try:
                if line.startswith("/") and not self._obey(line):
                    return
                if line.strip() and not line.startswith("/"):
                    self._ask(line.strip())
            except P2PTrainError as error:  # even without a model, /save works
                if not self._at_terminal:
                    raise
                print_error(error)

    def document(self) -> dict[str, Any]:
        turns = [{"role": turn.role, "content": turn.text} for turn in self.conversation.turns]
        document = {"turns": turns, "answers": [asdict(answer) for answer in self.answers], "stats": self._stats}
        return self._source.identity | self._source.facts() | document

    def show_stats(self) -> None:
        """Raises ``UserError`` if there are none."""
        if not self._stats and "split" not in self._source.facts():  # a split model always has figures
            raise UserError("no answer is complete yet", remedy="/stats shows the last one")
        self._source.show_stats([self._stats])

    def _typed_lines(self) -> Iterator[str]:
        with contextlib.suppress(ImportError):  # Windows, or an interpreter that was built without it
            import readline  # noqa: F401 - input() uses it from now on
        warned = False
        while True:
            count = len(self.answers)
            try:
                line = input("> ")
            except EOFError:
                typer.echo()
                return
            except UnicodeDecodeError:
                typer.echo("that was not UTF-8 text", err=True)
                continue
            except KeyboardInterrupt:
                typer.echo()
                if warned:
                    return
                warned = True
                self._print_note("Ctrl+C again leaves, as Ctrl+D and /quit do")
                continue
            yield line
            warned = len(self.answers) > count and self.answers[-1].ended == "cancelled"

    def _piped_lines(self) -> Iterator[str]:
        while True:
            try:
                line = sys.stdin.readline(_LONGEST + 1)
            except UnicodeDecodeError as error:
                raise UserError("standard input is not UTF-8 text", remedy="convert it with iconv -t UTF-8") from error
            if not line:
                return
            if len(line) > _LONGEST:
                text = f"standard input has a line of more than {_LONGEST >> 20} Mi characters"
                raise UserError(text, remedy="each line is a question")
            yield line.rstrip("\r\n")

    # --------------------------------------------------------------------------------------------------- questions

    def _ask(self, question: str) -> None:
        self.conversation.ask(question)
        try:
            answer = self._write_answer(question)
        except BaseException:
            self.conversation.take_back()
            raise
        if answer.text:
            self.conversation.answer(answer.text)
        else:
            self.conversation.take_back()  # the next question must not follow an unanswered one
        self.answers.append(answer)

    def _write_answer(self, question: str) -> Answer:
        """Print the answer as it arrives, without leading white space."""
        from p2ptrain.cli.text import Answer

        request = self._options.request(self._max_new_tokens, turns=tuple(self.conversation.turns))
        answer, began, writing = Answer(question, ended="cancelled"), time.perf_counter(), None
        self._waiting.progress("…")
        try:
            writing = self._thread.call(self._source.service.write(request))
            self._note_left_out(writing.left_out)
            pieces = aiter(writing)
            while (piece := self._thread.call(_next_piece(pieces))) is not None:
                text = piece.text if answer.text.strip() else piece.text.lstrip()
                answer.take(piece, time.perf_counter() - began)
                if text and not self._options.as_json:
                    self._waiting.clear()
                    write(text)
            answer.ended, self._stats = writing.ended, self._thread.call(_stats_of(writing))
        except KeyboardInterrupt:
            if not self._at_terminal:
                raise
        finally:
            self._waiting.clear()
            if not self._options.as_json:
                typer.echo()
            if writing is not None:
                self._thread.call(writing.close())  # Ctrl+C during this call leaves
        answer.text = answer.text.strip()
        self._note_figures(answer, 0 if writing is None else writing.prompt_tokens)
        return answer

    def _note_left_out(self, left_out: int) -> None:
        turns, self._left_out = left_out - self._left_out, left_out
        if turns > 0:
            self._waiting.clear()
            oldest = "turn no longer fits" if turns == 1 else f"{turns} turns no longer fit"
            context = f"the context of {self._source.service.context} tokens"
            typer.secho(f"(the oldest {oldest} {context}: the model does not see them any more)", dim=True, err=True)

    def _note_figures(self, answer: Answer, prompt_tokens: int) -> None:
        speed = answer.tokens / max(answer.seconds, 1e-9)
        note = f"{answer.tokens} token{'s' * (answer.tokens != 1)}, {speed:.0f} tokens/s"
        if answer.tokens and not answer.text and answer.ended != "cancelled":
            note += ", nothing but white space: the question is forgotten"
        if answer.ended == "cancelled":
            note = f"{note}; cancelled. Ctrl+C again leaves" if answer.text else "cancelled, the question is forgotten"
        elif answer.ended == "length":
            context = self._source.service.context
            full = context is not None and prompt_tokens + self._max_new_tokens > context
            note += "; cut off, the context is full" if full else "; cut off, --tokens N allows more"
        self._print_note(note)

    def _print_note(self, text: str) -> None:
        if self._at_terminal and not self._options.as_json:
            typer.secho(f"({text})", dim=True, err=True)

    # ---------------------------------------------------------------------------------------------------- commands

    def _obey(self, line: str) -> bool:
        """Carry out a command; return False to leave. Raises ``UserError`` for an unknown one."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/help":
            typer.echo(HELP, err=True)
        elif name == "/reset":
            self.conversation.reset()
            self._left_out = 0
            self._print_note("a new conversation")
        elif name == "/stats":
            if not self._options.as_json:  # the document has them
                self.show_stats()
        elif name == "/save":
            self._save(rest.strip())
        else:
            remedy = "/help lists them; begin with a space to send it to the model"
            raise UserError(f"there is no command {name}", remedy=remedy)
        return True

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs the name of a file", remedy="such as /save talk.json")
        path = Path(name).expanduser()
        turns = self.conversation.turns
        if path.suffix == ".json":
            content = json.dumps([{"role": turn.role, "content": turn.text} for turn in turns], indent=2) + "\n"
        else:
            content = "\n".join(f"{turn.role.capitalize()}: {turn.text}" for turn in turns) + "\n"
        try:
            # Only a file that this conversation wrote may be overwritten.
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as handle:
                handle.write(content)
        except FileExistsError as error:
            raise UserError(f"{path} exists", remedy="choose another name") from error
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", remedy="choose another place") from error
        self._saved.add(path)
        self._print_note(f"{len(turns)} turns in {path}")
