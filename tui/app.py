"""The terminal app. A ``SeedSource`` fills a store with what the seed sends, and panels draw from it.

Rules
    1. Ten times a second the app draws the panels whose topics changed since, at most every ``EVERY_S``; and at once
       those whose size, colours or job changed.
    2. A large terminal (``-wide``) shows all panels, a small one (``-compact``) one of six views. Such classes of the
       app select the panels; ``app.tcss`` has the layout.
    3. The *job in view* is the one chosen in the table of jobs, otherwise the seed's current job. Keys act on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, ClassVar

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static

from p2ptrain.core.errors import P2PTrainError
from tui import format as fmt
from tui.chain_panel import ChainsPanel
from tui.dialogs import LEAVE, ChatScreen, PromptScreen
from tui.format import ABSENT, SLOWEST, SPENT_LOOKS, Span
from tui.model import LinkPhase, SeedConnection
from tui.panels import Frame, HeaderBar, RecoveriesPanel, RingPanel, TrainingPanel
from tui.serving import ServingPanel
from tui.source import SeedSource
from tui.tables import CheckpointsPanel, EventsPanel, JobsPanel, PeersPanel, TablePanel
from tui.theme import DARK, THEMES, Palette
from wire.records import JobInfo

WIDE_COLUMNS, WIDE_ROWS = 120, 38
"""From this size on everything is shown at once; below it, one of six views."""
VIEWS = ("Cluster", "Training", "Jobs", "Events", "Chains", "Serving")
CLUSTER, CHAINS, SERVING = 1, 5, 6
"""Numbers of views: their keys. In the wide layout the last two replace the panels of ring and training."""
STICKY_S = 7 * 86_400.0
"""Timeout of a notification that stays until a click removes it."""
FOCUS_OF_VIEW = ("#peers-table", "#training", "#jobs-table", "#events-table", "#chains", "#serving")
_LEGENDS = {
    "Peers": fmt.PEER_LOOKS,
    "Jobs": fmt.JOB_LOOKS,
    "Recoveries": fmt.PHASE_LOOKS,
    "Split models": {
        "weights": fmt.WEIGHTS,
        "caches": fmt.CACHES,
        "free": fmt.FREE,
        "busy": fmt.BUSY,
        "bubble": fmt.BUBBLE,
        "slowest": SLOWEST,
        "missing": ABSENT,
    },
    "Serving: where a token's time goes": SPENT_LOOKS,
}


class HelpScreen(ModalScreen[None]):
    BINDINGS = [Binding("escape,question_mark,q,enter", "dismiss"), LEAVE]  # noqa: RUF012 - Textual's own type

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self._palette = palette

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="dialog") as dialog:
            dialog.border_title = "Help"
            dialog.border_subtitle = "esc closes"
            yield Static(Text("\n").join(self._palette.text(row) for row in self._rows()))

    def _rows(self) -> list[list[Span]]:
        keys = [binding for binding in self.app.BINDINGS if isinstance(binding, Binding) and binding.tooltip]
        rows = [[Span(f"{key.key_display or key.key:>9}  ", "accent"), Span(key.tooltip)] for key in keys]
        for title, looks in _LEGENDS.items():
            rows += [[], [Span(title, "strong")], *_legend(looks)]
        slowest = Span("is at the slowest link of the ring, and stage.", "dim")
        return [*rows, [], [Span(f"{SLOWEST.symbol} ", SLOWEST.role), slowest]]


def _legend(looks: dict[str, fmt.Look]) -> list[list[Span]]:
    """The looks in rows of three."""
    spans = [
        span for state, look in looks.items() for span in (Span(f"  {look.symbol} ", look.role), Span(f"{state:<11}"))
    ]
    return [spans[start : start + 6] for start in range(0, len(spans), 6)]


class P2PTrainApp(App[bool]):
    """The app. Its result is true if the user left with Ctrl+C. ``refresh_hz``: redraws per second; 0: none, for
    tests."""

    TITLE = "p2ptrain"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "ask('pause')", "Pause", tooltip="pause the job in view"),
        Binding("r", "ask('resume')", "Resume", tooltip="resume it"),
        Binding("s", "ask('save')", "Save", tooltip="save a checkpoint"),
        Binding("x", "cancel_job", "Cancel", tooltip="cancel the job (asks first)"),
        Binding("n", "create_job", "New", tooltip="create a job from a profile"),
        Binding("R", "restore_job", "Restore", tooltip="take the job back to a checkpoint"),
        Binding("c", "chat", "Chat", tooltip="chat with a served model"),
        Binding("slash", "filter", "Filter", key_display="/", tooltip="show only rows with some words; esc: all"),
        Binding("escape", "show_matching('')", show=False),
        *(Binding(str(number), f"view({number})", name, show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("tab", "step(1)", show=False, priority=True, tooltip="the next table or view; 1 to 6: a view"),
        Binding("shift+tab", "step(-1)", show=False, priority=True),
        Binding("d", "flip_theme", show=False, tooltip="dark or light"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "leave", "Quit", tooltip="leave; training goes on"),
        Binding("ctrl+c", "interrupt", show=False),
    ]

    def __init__(self, source: SeedSource, *, refresh_hz: float = 10.0) -> None:
        super().__init__()
        for theme, _ in THEMES.values():
            self.register_theme(theme)
        self.theme = "p2ptrain-dark"
        self.source = source
        self.chosen_job: str | None = None
        self.pattern = ""
        self.view = CLUSTER
        self.wide = False
        self._refresh_hz = refresh_hz
        self._drawings: dict[Any, tuple[object, object, float]] = {}  # by panel: what it was drawn from, and when
        self._phase = LinkPhase.CONNECTING

    # -------------------------------------------------------------------------------------------------------- drawing

    def compose(self) -> ComposeResult:
        yield HeaderBar()
        yield Static(id="tabs")
        with Horizontal(id="top"):
            yield RingPanel()
            yield TrainingPanel()
        yield ChainsPanel()
        yield ServingPanel()
        yield PeersPanel()
        with Horizontal(id="bottom"):
            yield JobsPanel()
            with Vertical(id="records"):
                yield CheckpointsPanel()
                yield RecoveriesPanel()
            yield EventsPanel()
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._lay_out(self.size)
        self.action_view(self.view)
        if self._refresh_hz:
            self.set_interval(1 / self._refresh_hz, self.refresh_panels)
        self.run_worker(self.source.run(), name="source", exclusive=True, group="source")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"line": DARK.colours["border"], "dim": DARK.colours["dim"]}

    @property
    def palette(self) -> Palette:
        return THEMES[self.theme][1] if self.theme in THEMES else THEMES["p2ptrain-dark"][1]

    @property
    def job(self) -> JobInfo | None:
        store = self.source.store
        return store.jobs.get(self.chosen_job or "") or store.current_job()

    def refresh_panels(self) -> None:
        if not self._has_panels:
            return  # the app is closing: its timer is not gone yet
        if self.chosen_job not in self.source.store.jobs:
            self.chosen_job = None  # the seed no longer lists it
        store, job, now = self.source.store, self.job, self.source.clock.now()
        self._notify_link_change(store.link)
        self._choose_top_panel(job)
        if job is not None:
            self.source.watch(job.id)
        frame = Frame(store, job, now, self.source.clock.wall(), self.palette, self.source.address, self.pattern)
        panels: Iterable[Any] = self.screen_stack[0].query("HeaderBar, Panel")
        for panel in panels:
            if not panel.display or panel.size.width == 0:
                continue
            sizes = (panel.size, *(child.size for child in panel.children))
            layout = (job.id if job else "", self.theme, self.pattern, sizes)
            second = int(now) if panel.TIMED else 0
            versions = (*(store.versions[topic] for topic in sorted(panel.TOPICS)), second)
            last_layout, last_versions, drawn_at = self._drawings.get(panel, (None, None, 0.0))
            is_due = last_versions != versions and now - drawn_at >= panel.EVERY_S
            if is_due or last_layout != layout:
                self._drawings[panel] = layout, versions, now
                panel.show(frame)

    def _choose_top_panel(self, job: JobInfo | None) -> None:
        """Show serving or chains in the place of the ring, if the user chose so or no ring trains."""
        store = self.source.store
        idle = self.view == CLUSTER and self.chosen_job is None and not (job is not None and job.members)
        serving = self.view == SERVING or (idle and bool(store.serving))
        chains = self.view == CHAINS or (idle and bool(store.parts) and not serving)
        for name, shown in (("-chains", chains), ("-serving", serving)):
            if shown != self.has_class(name):
                self.set_class(shown, name)
                self.call_after_refresh(self.refresh_panels)

    def _notify_link_change(self, link: SeedConnection) -> None:
        before, self._phase = self._phase, link.phase
        if link.phase is before:
            return
        stale = link.phase is not LinkPhase.LIVE and self.source.store.cluster is not None
        self.set_class(stale, "-stale")
        if stale and before is LinkPhase.LIVE:
            remedy = link.remedy or "training continues without it; this screen reconnects automatically"
            text = f"{link.problem}\n{remedy}"
            self.notify(text, title="The seed was lost", severity="warning", timeout=10, markup=False)
        elif before is LinkPhase.LOST and link.phase is LinkPhase.LIVE:
            self.notify("the screen is live again", title="The seed is back", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self._lay_out(event.size)

    def _lay_out(self, size: Size) -> None:
        self.wide = size.width >= WIDE_COLUMNS and size.height >= WIDE_ROWS
        self._switch_class("-wide" if self.wide else "-compact", "-wide", "-compact")
        self.call_after_refresh(self.refresh_panels)

    def _switch_class(self, name: str, *names: str) -> None:
        """Add the class ``name`` and remove the others of ``names``."""
        if not self.has_class(name):
            self.remove_class(*names, update=False)
            self.add_class(name)

    # ----------------------------------------------------------------------------------------------------- navigation

    @property
    def _has_panels(self) -> bool:
        return bool(self.screen_stack and self.screen_stack[0].query(HeaderBar))

    def action_view(self, number: int) -> None:
        """Show view ``number``; before the app has started, choose the one that it begins with."""
        self.view = number
        if not self._has_panels:
            return
        self._switch_class(f"-view-{number}", *(f"-view-{other}" for other in range(1, len(VIEWS) + 1)))
        tabs = [
            Content.styled(f" {index} {name} ", "$background on $accent bold")
            if index == number
            else Content.from_markup(f"[@click=app.view({index})] {index} {name} [/]")
            for index, name in enumerate(VIEWS, 1)
        ]
        self.screen_stack[0].query_one("#tabs", Static).update(Content(" ").join(tabs))
        self.call_after_refresh(self._enter_view)

    def _enter_view(self) -> None:
        self.refresh_panels()
        self.screen_stack[0].query_one(FOCUS_OF_VIEW[self.view - 1]).focus()

    def action_step(self, by: int) -> None:
        """Move the focus; past the last widget of a compact view, go to the next view."""
        widgets = self.screen.focus_chain
        index = widgets.index(self.focused) + by if self.focused in widgets else 0
        if len(self.screen_stack) == 1 and not self.wide and not 0 <= index < len(widgets):
            self.action_view((self.view - 1 + by) % len(VIEWS) + 1)
        elif by > 0:
            self.screen.focus_next()
        else:
            self.screen.focus_previous()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the details of the row under the cursor. In Jobs the cursor also chooses the job in view."""
        if event.option_list.id == "jobs-table":
            self.chosen_job = event.option_id
        for panel in self.screen_stack[0].query(TablePanel):
            self._drawings.pop(panel, None)
        self.refresh_panels()

    def action_flip_theme(self) -> None:
        self.theme = "p2ptrain-light" if self.theme == "p2ptrain-dark" else "p2ptrain-dark"
        self.call_after_refresh(self.refresh_panels)

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.palette))

    def action_leave(self) -> None:
        cluster = self.source.store.cluster
        where = cluster.address if cluster and cluster.address else self.source.address
        self.exit(message=f"The cluster goes on. Look again: p2ptrain tui {where}")

    def show_message(self, level: str, title: str, text: str) -> None:
        """Show a message of the code that runs the app. It stays, because nobody may be looking now."""
        severity: SeverityLevel = "warning" if level == "warning" else "error" if level == "error" else "information"
        self.notify(text, title=title, severity=severity, timeout=STICKY_S, markup=False)

    def action_interrupt(self) -> None:
        self.exit(True)

    # ------------------------------------------------------------------------------------------------------- requests

    def action_ask(self, verb: str, job_id: str = "") -> None:
        job = self.source.store.jobs.get(job_id) or self.job
        if job is None:
            self.notify("n creates one", title="There is no job yet", severity="warning")
            return
        request = f"{verb} {job.id}"
        if all(worker.name != request for worker in self.workers):  # a repeating key sends one request
            answer = self.source.request(f"jobs.{verb}", {"job": job.id})
            self.run_worker(self._carry_out(answer, job.name, verb), name=request)

    async def _carry_out(self, request: Awaitable[object], name: str, verb: str) -> bool:
        """Show whether it succeeds, and return it."""
        try:
            await request
        except P2PTrainError as error:
            text = f"{error.message}\n{error.remedy}" if error.remedy else error.message
            self.notify(text, title=f"Cannot {verb} {name}", severity="error", timeout=10, markup=False)
            return False
        self.notify(_DONE[verb], title=name, markup=False)
        return True

    async def _choose(self, title: str, about: str, choices: dict[str, str]) -> str:
        answer = await self.push_screen_wait(PromptScreen(title, about, choices))
        return answer[0] if answer else ""

    @work
    async def action_cancel_job(self) -> None:
        job = self.job
        if job is not None and self.source.store.link.phase is LinkPhase.LIVE:
            end = f"It stops for good at step {job.step:,} of {job.steps_total:,}. Its checkpoints stay."
            text = f"{end}\nTo stop for a while only, pause it with p."
            if await self._choose(f"Cancel {job.name}?", text, {"no": "No, go on", "yes": "Yes, cancel it"}) != "yes":
                return
        self.action_ask("cancel", job.id if job else "")  # reports why it cannot

    @work
    async def action_create_job(self, typed: str = "") -> None:
        about = "A profile and settings to change:  tiny job.steps=200  or  ./mine.toml"
        prompt = PromptScreen("New job", about, self.source.actions.profiles(), typed)
        if answer := await self.push_screen_wait(prompt):
            request = self.source.actions.create_job(*answer)
            if not await self._carry_out(request, answer[0] or answer[1], "create"):
                self.action_create_job(answer[1])

    @work
    async def action_restore_job(self) -> None:
        job = self.job
        saved = self.source.store.checkpoints_in_order(job.id if job else "")
        if job is None or not saved:
            self.notify("s saves one", title="There is no checkpoint yet", severity="warning")
            return
        lines = {
            item.id: f"{item.step:<8} val {fmt.loss(item.val_loss):<9} saved {fmt.clock(item.created_at)}"
            f" on {item.peer_name}" + ("" if item.stage is None else f", part {item.stage}")
            for item in saved
        }
        if chosen := await self._choose(f"Restore {job.name}", "To which step? Those after it are run again.", lines):
            await self._carry_out(self.source.request("checkpoints.restore", {"id": chosen}), job.name, "restore")

    @work
    async def action_chat(self) -> None:
        known = self.source.store.serving
        served = [info for info in known.values() if info.role == "verifier" and not info.upstream]
        if not served:
            self.notify("6 shows how to start a verifier", title="No model is served yet", severity="warning")
            return
        lines = {info.id: f"{info.label}   on {info.name}" for info in served}
        if chosen := await self._choose("Chat", "With which model?", lines) if len(served) > 1 else served[0].id:
            asked, stream = (known[chosen].model, known[chosen].peer), self.source.actions.stream
            self.push_screen(ChatScreen(lines[chosen], lambda turns: stream(*asked, turns)))

    async def action_filter(self) -> None:
        prompt = PromptScreen(
            "Filter", "only rows with these words  │  enter keeps it  │  esc: all rows", {}, self.pattern
        )
        await self.push_screen(prompt, lambda answer: self.action_show_matching(answer[1] if answer else ""))
        self.watch(prompt.query_one(Input), "value", self.action_show_matching)

    def action_show_matching(self, pattern: str) -> None:
        self.pattern = pattern
        self.refresh_panels()


_DONE = {
    "pause": "will pause at the next step boundary",
    "resume": "will resume",
    "save": "will be saved as soon as no step runs",
    "cancel": "is cancelled",
    "create": "is a job now; it starts when enough workers are ready",
    "restore": "goes back to the checkpoint",
}
