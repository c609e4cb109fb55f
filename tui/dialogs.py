"""Screens over the panels: a prompt, and a conversation with a served model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.markup import escape
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.texts import on_terminal
from tui.source import Messages

LEAVE = Binding("ctrl+c", "app.interrupt", show=False)  # dialogs do not have the app's own bindings


class PromptScreen(ModalScreen[tuple[str, str]]):
    """Asks for a text, and shows those ``choices``, lines by key, that begin with its words; those with ``=`` do not
    count. None is chosen at first. The result: key of the chosen line, or "", and the text; None after escape."""

    BINDINGS = [Binding("escape", "dismiss"), Binding("up", "move('up')"), Binding("down", "move('down')"), LEAVE]  # noqa: RUF012
    AUTO_FOCUS = "Input"

    def __init__(self, title: str, about: str, choices: dict[str, str], typed: str = "") -> None:
        super().__init__(classes="" if choices else "-line")
        self._title, self._about, self._choices, self._typed = title, about, choices, typed

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = escape(self._title)
            dialog.border_subtitle = "↑ ↓ enter  │  esc closes" if self._choices else self._about
            with VerticalScroll() as scroll:
                scroll.anchor()
                yield Static(self._about, markup=False)
            yield Input(self._typed, select_on_focus=False, compact=True)
            yield OptionList(markup=False, compact=True).set_options(map(Option, self._choices.values(), self._choices))

    def on_input_changed(self, event: Input.Changed) -> None:
        words = " ".join(word for word in event.value.split() if "=" not in word).casefold()
        found = [Option(line, key) for key, line in self._choices.items() if line.casefold().startswith(words)]
        self.query_one(OptionList).set_options(found).highlighted = 0 if found and words else None

    def action_move(self, where: str) -> None:
        getattr(self.query_one(OptionList), f"action_cursor_{where}")()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self.query_one(OptionList).highlighted is not None:
            self.query_one(OptionList).action_select()
        elif event.value.strip() or not self._choices:
            self.dismiss(("", event.value))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss((event.option_id or "", self.query_one(Input).value))


class ChatScreen(PromptScreen):
    """A conversation. ``stream`` writes the answer to its turns, in pieces."""

    def __init__(self, title: str, stream: Callable[[Messages], AsyncGenerator[str, None]]) -> None:
        super().__init__(title, "enter asks  │  esc stops an answer, or leaves", {})
        self._stream, self._turns, self._shown = stream, Messages(), Content()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.prevent_default()  # the text is no result
        if event.value.strip() and all(worker.node is not self for worker in self.workers):
            self.run_worker(self._ask(event.value.strip()))
            event.input.clear()

    async def _ask(self, question: str) -> None:
        """Show the answer as it arrives. After a stop or an error what came stays in the conversation."""
        self._shown += Content("\n\n" * bool(self._shown)) + Content.styled(f"> {question}\n", "bold $accent")
        shown, text, note = self.query_one(Static), "", "(stopped)"
        turns = [*self._turns, {"role": "user", "content": question}]
        shown.update(self._shown + "…")
        try:
            async for piece in self._stream(turns):
                text = (text + piece).lstrip()
                shown.update(self._shown + (on_terminal(text) or "…"))
            note = "" if text else "(nothing but white space)"
        except P2PTrainError as error:
            note = f"✗ {error.with_remedy}"
        finally:
            if text:
                self._turns = [*turns, {"role": "assistant", "content": text.rstrip()}]
            self._shown += Content.assemble(on_terminal(text), " " * bool(text), (note, "$warning"))
            shown.update(self._shown)

    async def action_dismiss(self, result: tuple[str, str] | None = None) -> None:
        if not self.workers.cancel_node(self):
            await super().action_dismiss(result)
