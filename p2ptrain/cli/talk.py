"""A conversation at a terminal, or over a pipe: reads questions, writes answers as they come, obeys its commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from p2ptrain.cli.output import printable
from p2ptrain.cli.prompting import typed_line
from p2ptrain.cli.sources import Answer
from p2ptrain.cli.speakers import Speaker
from p2ptrain.cli.text_options import write
from p2ptrain.compute.text import Conversation, written
from p2ptrain.core.errors import P2PTrainError, StorageError, UserError

HELP = """\
  /reset       begin a new conversation
  /stats       where a token's time goes, of a model that is split, or a verifier's
  /save FILE   write the conversation to a file: JSON where its name ends so, else text
  /help        this list
  /quit        leave, as Ctrl+D does
  Ctrl+C cancels an answer; what was said so far stays. A line that begins with a space is never a command."""
_PROMPT, _THINKING = "> ", "…"
_LONGEST = 1 << 24  # a line that is longer is most likely no question


class Talk:
    """One conversation with one model.

    Args:
        quiet: answers are not shown; ``answers`` has them.
    """

    def __init__(self, speaker: Speaker, *, system: str, quiet: bool) -> None:
        self.conversation = Conversation(system)
        self.answers: list[Answer] = []
        self._speaker = speaker
        self._quiet = quiet
        self._at_terminal = sys.stdin.isatty()
        self._saved: set[Path] = set()

    def run(self) -> None:
        """Until the person leaves, or the input ends.

        Raises:
            P2PTrainError: a mistake of the person's, or the model cannot go on; at a terminal it is told, and the talk
                goes on.
            KeyboardInterrupt: Ctrl+C where no terminal is read.
        """
        for line in self._typed() if self._at_terminal else self._piped():
            try:
                if line.startswith("/") and not self._obey(line):
                    return
                if line.strip() and not line.startswith("/"):
                    self._ask(line.strip())
            except P2PTrainError as error:  # be it that the model is lost: what was said is not, and may be saved
                if not self._at_terminal:
                    raise
                typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
                typer.echo(f"{printable(error.message)}" + f"\n  → {error.remedy}" * bool(error.remedy), err=True)

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        turns = [{"role": turn.role, "content": turn.text} for turn in self.conversation.turns]
        return {**self._speaker.facts(), "turns": turns, "answers": [asdict(answer) for answer in self.answers]}

    # ------------------------------------------------------------------------------------------------ what is read

    def _typed(self) -> Iterator[str]:
        """Lines of a person. Ctrl+C after a cancelled answer, or twice, leaves; so does Ctrl+D."""
        warned = False
        while True:
            count = len(self.answers)
            try:
                line = typed_line(_PROMPT)
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
                warned = self._say("Ctrl+C again leaves, as Ctrl+D and /quit do")
                continue
            yield line
            warned = len(self.answers) > count and self.answers[-1].ended == "cancelled"

    def _piped(self) -> Iterator[str]:
        while True:
            try:
                line = sys.stdin.readline(_LONGEST + 1)
            except UnicodeDecodeError as error:
                raise UserError("standard input is not UTF-8 text") from error
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
            answer, full = self._answered(question)
        except BaseException:
            self.conversation.take_back()
            raise
        if answer.text:
            self.conversation.answer(answer.text)
        else:
            self.conversation.take_back()  # a question without an answer would stand before the next one
        self.answers.append(answer)
        self._tell(answer, full=full)

    def _answered(self, question: str) -> tuple[Answer, bool]:
        """Compute the answer and show it as it comes. Returns it, and whether there was no room for a longer one."""
        began, first_s, cancelled, said = time.perf_counter(), 0.0, False, 0
        speaking = self._speaker.speak(self.conversation)
        shown = _Shown(live=self._at_terminal, quiet=self._quiet)
        text = ""
        try:
            with closing(speaking.pieces()) as pieces:
                for piece in pieces:
                    if speaking.dropped > said:
                        said = speaking.dropped
                        shown.clear()
                        self._say_dropped(said)
                    first_s = first_s or time.perf_counter() - began
                    text += piece
                    shown.piece(piece)
        except KeyboardInterrupt:
            if not self._at_terminal:
                raise
            cancelled = True
        finally:
            shown.end()
        seconds = time.perf_counter() - began
        ended = "cancelled" if cancelled else speaking.ended
        return Answer(question, text.strip(), speaking.tokens, seconds, first_s, ended), speaking.full

    def _say_dropped(self, turns: int) -> None:
        oldest = "turn no longer fits" if turns == 1 else f"{turns} turns no longer fit"
        context = f"the context of {self._speaker.context} tokens"
        typer.secho(f"(the oldest {oldest} {context}: the model does not see them any more)", dim=True, err=True)

    def _tell(self, answer: Answer, *, full: bool) -> None:
        speed = answer.tokens / max(answer.seconds, 1e-9)
        said = f"{answer.tokens} token{'s' * (answer.tokens != 1)}, {speed:.0f} tokens/s"
        if answer.tokens and not answer.text and answer.ended != "cancelled":
            said += ", nothing but white space: the question is forgotten"
        if answer.ended == "cancelled":
            said = f"{said}; cancelled. Ctrl+C again leaves" if answer.text else "cancelled, the question is forgotten"
        elif answer.ended == "length":
            said += "; cut off, the context is full" if full else "; cut off, --tokens N allows more"
        self._say(said)

    def _say(self, text: str) -> bool:
        """A remark beside the conversation; only to a person."""
        if self._at_terminal and not self._quiet:
            typer.secho(f"({text})", dim=True, err=True)
        return True

    # ---------------------------------------------------------------------------------------------------- commands

    def _obey(self, line: str) -> bool:
        """Returns whether the talk goes on. Raises ``UserError`` for what is no command."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/help":
            typer.echo(HELP, err=True)
        elif name == "/reset":
            self.conversation.reset()
            self._say("a new conversation")
        elif name == "/stats":
            if not self._quiet:  # one document has all of it
                self.show_stats()
        elif name == "/save":
            self._save(rest.strip())
        else:
            raise UserError(
                f"there is no command {name}", remedy="/help lists them; begin with a space to say it to the model"
            )
        return True

    def show_stats(self) -> None:
        """Raises ``UserError`` where there are none."""
        self._speaker.show_stats()

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs the name of a file", remedy="such as /save talk.json")
        path = Path(name).expanduser()
        turns = self.conversation.turns
        if path.suffix == ".json":
            content = json.dumps([{"role": turn.role, "content": turn.text} for turn in turns], indent=2) + "\n"
        else:
            content = written(turns) + "\n"
        try:
            # What was there before this talk is somebody's; what this talk wrote it may write again.
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as handle:
                handle.write(content)
        except FileExistsError as error:
            raise UserError(f"{path} exists", remedy="choose another name") from error
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", remedy="choose another place") from error
        self._saved.add(path)
        self._say(f"{len(turns)} turns in {path}")


class _Shown:
    """An answer on standard output, without the white space that it begins with, and a sign of life before it."""

    def __init__(self, *, live: bool, quiet: bool) -> None:
        self._quiet = quiet
        self._waits = live and not quiet and sys.stderr.isatty()
        self._began = False
        if self._waits:
            sys.stderr.write(_THINKING)
            sys.stderr.flush()

    def piece(self, text: str) -> None:
        text = text if self._began else text.lstrip()
        if self._quiet or not text:
            return
        self.clear()
        self._began = True
        write(text)

    def end(self) -> None:
        self.clear()
        if not self._quiet:
            typer.echo()

    def clear(self) -> None:
        """Take the sign of life away."""
        if self._waits:
            self._waits = False
            sys.stderr.write("\r" + " " * len(_THINKING) + "\r")
            sys.stderr.flush()
