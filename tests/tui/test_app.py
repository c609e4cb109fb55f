"""The app with a person at the keys, over the demo cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot

from p2ptrain.core.errors import UserError
from tests.tui.demo import DemoCluster, DemoSource
from tests.tui.invariants import check_store
from tui.app import HelpScreen, P2PTrainApp
from tui.chains import how_to_split
from tui.dialogs import ChatScreen, PromptScreen
from tui.model import RecordStore
from tui.panels import HeaderBar, RingPanel, TrainingPanel
from tui.tables import CheckpointsPanel, JobsPanel, PeersPanel
from wire.address import how_to_join
from wire.records import EventInfo, MemberScore

COMPACT, WIDE = (80, 24), (160, 48)


class Stage:
    """A running app, its source and its pilot."""

    def __init__(self, app: P2PTrainApp, source: DemoSource, pilot: Pilot[None]) -> None:
        self.app, self.source, self.pilot = app, source, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def settle(self, seconds: float = 1.0) -> None:
        """Let time pass for the app, and everything be drawn."""
        self.source.clock.time += seconds
        # The app's timer, which does not run here, comes again once a panel that came into view has its size.
        for _ in range(2):
            self.app.refresh_panels()
            await self.pilot.pause()

    def text(self, selector: str) -> str:
        """What a widget shows, borders included."""
        region = self.app.screen_stack[0].query_one(selector).region
        strips = self.app.screen_stack[0]._compositor.render_strips()
        return "\n".join(strip.crop(region.x, region.right).text for strip in strips[region.y : region.bottom])

    def shown(self) -> set[str]:
        ids = ("ring", "training", "chains", "serving", "peers", "jobs", "checkpoints", "events")
        return {id_ for id_ in ids if self.app.screen_stack[0].query_one(f"#{id_}").region.area}

    def notices(self) -> list[str]:
        return [f"{notice.title}: {notice.message}" for notice in self.app._notifications]


def forget(store: RecordStore, topic: str) -> None:
    store.apply(f"{topic}-gone", [{"id": id_} for id_ in list(getattr(store, topic))], 0.0)


@asynccontextmanager
async def staged(
    size: tuple[int, int] = COMPACT,
    *,
    peers: int = 6,
    serving: bool = False,
    before: Callable[[DemoSource], None] = lambda source: None,
) -> AsyncIterator[Stage]:
    source = DemoSource(DemoCluster(peers, serving=serving))
    before(source)
    app = P2PTrainApp(source, refresh_hz=0)
    app.animation_level = "none"
    async with app.run_test(size=size, notifications=True) as pilot:
        stage = Stage(app, source, pilot)
        await stage.settle()
        yield stage
        check_store(source.store)


# ------------------------------------------------------------------------------------------------------------- views


async def test_a_small_terminal_shows_one_view_at_a_time_and_a_large_one_everything():
    async with staged(COMPACT) as stage:
        for key, shown in (
            ("2", {"training"}),
            ("4", {"events"}),
            ("5", {"chains"}),
            ("6", {"serving"}),
            ("1", {"ring", "peers"}),
            ("3", {"jobs", "checkpoints"}),
        ):
            await stage.press(key)
            assert stage.shown() == shown
        seen = []
        for _ in range(5):
            await stage.pilot.press("tab")
            assert stage.app.focused is not None
            seen.append((stage.app.view, stage.app.focused.id))
        assert seen == [
            (3, "checkpoints-table"),
            (4, "events-table"),
            (5, "chains"),
            (6, "serving"),
            (1, "peers-table"),
        ]
        await stage.pilot.press("shift+tab", "3")
        await stage.pilot.resize_terminal(*WIDE)
        await stage.settle()
        assert stage.shown() == {"ring", "training", "peers", "jobs", "checkpoints", "events"}
        for key, focused in (("3", "jobs-table"), ("5", "chains"), ("1", "peers-table")):
            await stage.pilot.press(key)
            assert stage.app.focused is not None
            assert stage.app.focused.id == focused


async def test_no_size_breaks_it():
    async with staged(WIDE, peers=24, serving=True) as stage:
        for size, key in zip([(1, 1), (20, 5), (119, 37), (120, 38)], "1256", strict=True):
            await stage.pilot.resize_terminal(*size)
            stage.source.tick()
            await stage.press(key)


async def test_help_closes_and_quitting_says_that_training_goes_on():
    async with staged() as stage:
        await stage.press("question_mark")
        assert isinstance(stage.app.screen, HelpScreen)
        await stage.press("p", "s", "x")
        await stage.press("escape")
        assert not isinstance(stage.app.screen, HelpScreen)
        await stage.press("q")
        assert stage.app._exit
        printed = [str(item) for item in stage.app._exit_renderables]
        assert any("The cluster goes on. Look again: p2ptrain tui " in line for line in printed)
        assert stage.source.requests == [], "the keys below the help are asleep"


@pytest.mark.parametrize("key", ["question_mark", "x", "n", "R", "c", "slash"])
async def test_ctrl_c_leaves_from_a_dialog_too_and_says_so_to_the_caller(key: str):
    async with staged(serving=True) as stage:
        await stage.press(key)
        assert len(stage.app.screen_stack) == 2
        await stage.press("ctrl+c")
        assert stage.app.return_value is True
        assert stage.source.requests == []


# ----------------------------------------------------------------------------------------------------------- showing


async def test_new_steps_are_drawn_at_a_pace_that_can_be_read_and_nothing_else_is(monkeypatch):
    async with staged(WIDE) as stage:
        for told in ("attic", "192.168.1.20:7337", "● live"):
            assert told in stage.text("#header")
        assert "step 640" in stage.text("#ring")
        stage.source.tick()
        await stage.settle(0.1)
        assert "641/2,000" not in stage.text("#training")
        await stage.settle(0.5)
        assert "641/2,000" in stage.text("#training")
        assert "step 641" in stage.text("#ring")
        shown = []
        for kind in (HeaderBar, RingPanel, TrainingPanel, PeersPanel, JobsPanel, CheckpointsPanel):
            monkeypatch.setattr(kind, "show", lambda self, frame: shown.append(type(self)))
        stage.app.refresh_panels()
        assert shown == []
        stage.source.clock.time += 1  # ages grow
        stage.app.refresh_panels()
        assert set(shown) == {HeaderBar, PeersPanel, CheckpointsPanel}
        await stage.app.screen.remove_children()
        stage.app.refresh_panels()  # a timer that outlives the panels


async def test_peers_come_and_go_and_their_names_are_shown_and_not_obeyed():
    async with staged(WIDE, peers=3) as stage:
        store, name = stage.source.store, "[red]x[/] [@click=app.leave]y"
        store.apply("peers", [DemoCluster(6).peer(3).to_map() | {"rank": None, "job": ""}], 0.0)
        store.apply("peers", [DemoCluster(6).peer(0).to_map() | {"name": name}], 0.0)
        store.apply("peers-gone", [{"id": "peer1"}], 0.0)
        store.apply("jobs", [store.jobs["j1"].to_map() | {"name": "[bold]job[/bold]", "reason": "[/]"}], 0.0)
        store.malformed = 3
        store.versions["link"] += 1
        await stage.settle()
        assert "delos" in stage.text("#peers")
        assert "borea" not in stage.text("#peers")
        assert "gone" in stage.text("#ring")
        assert "not in the ring:" in stage.text("#ring")
        assert "[red]x[/]" in stage.text("#peers")
        assert "[bold]job[/bold]" in stage.text("#training")
        assert "▲ 3 malformed" in stage.text("#header")
        await stage.press("x", "y", "enter")
        assert any("[bold]job[/bold]" in notice for notice in stage.notices())


async def test_the_ring_shows_whose_vectors_a_robust_rule_leaves_out():
    async with staged(WIDE, peers=3) as stage:
        job = stage.source.store.jobs["j1"]
        scores = [MemberScore(peer, 40, 37 * rank, [1.0, 12.0][rank]) for rank, peer in enumerate(job.members[:2])]
        stage.source.store.apply("jobs", [dataclasses.replace(job, scores=scores).to_map()], 0.0)
        await stage.settle()
        assert "left out" in stage.text("#ring")
        assert "12.0×" in stage.text("#ring")
        assert "92%" in stage.text("#ring")


async def test_an_event_is_one_line_and_whole_under_the_cursor():
    async with staged(WIDE) as stage:
        long = "borea cannot go on: " + "no space is left on its disk, " * 4 + "free some and join again"
        event = EventInfo(99, 0.0, "error", "peer", long)
        stage.source.store.apply("events", [event.to_map()], 0.0)
        await stage.settle()
        shown = stage.text("#events-table").splitlines()
        assert "…" in shown[0]
        assert "fjord joined" in shown[1]
        assert "free some and join again" in " ".join(stage.text("#events .detail").split())
        await stage.press("4", "down")
        assert "join again" not in stage.text("#events")


async def test_empty_panels_say_what_to_do():
    async with staged(WIDE, peers=0) as stage:
        assert how_to_join("192.168.1.20:7337") in stage.text("#peers")
        for topic in ("jobs", "checkpoints", "parts"):
            forget(stage.source.store, topic)
        await stage.settle()
        for selector, told in (
            ("#jobs", "no jobs yet"),
            ("#checkpoints", "no checkpoints yet"),
            ("#training", "no steps yet"),
        ):
            assert told in stage.text(selector)
        await stage.press("p", "x")
        assert all("no job" in notice for notice in stage.notices())
        await stage.press("R", "c")
        assert [notice.split(":")[0] for notice in stage.notices()[2:]] == [
            "There is no checkpoint yet",
            "No model is served yet",
        ]
        assert stage.source.requests == []
        await stage.press("5")
        assert how_to_join("192.168.1.20:7337") in stage.text("#chains")
        stage.source.store.apply("peers", [DemoCluster(6).peer(3).to_map() | {"rank": None, "job": ""}], 0.0)
        await stage.press("1")
        assert "p2ptrain jobs create" in stage.text("#ring")
        await stage.press("5")
        assert how_to_split("192.168.1.20:7337") in stage.text("#chains")
        await stage.press("6")
        assert how_to_join("192.168.1.20:7337", "verifier") in stage.text("#serving")


async def test_without_a_connection_it_says_so():
    async with staged(before=lambda source: setattr(source, "cluster", None)) as stage:
        assert "◌ connecting to 192.168.1.20:7337" in stage.text("#header")
        assert "no connection to the seed" in stage.text("#ring")
        stage.source.lose()
        await stage.settle(3)
        assert "✗ the seed at 192.168.1.20:7337 closed the" in stage.text("#header")
        assert "closed the connection" in stage.text("#ring")
        stage.source.store.lost(UserError("no saved access to it", remedy="paste a ticket"), 0.0, 1.0)
        await stage.settle()
        assert "✗ no saved access to it" in stage.text("#header")
        assert "paste a ticket" in stage.text("#ring")


# ------------------------------------------------------------------------------------------------ chains and serving


async def test_chains_take_the_place_of_the_ring_where_a_person_asks_for_them_or_nobody_trains():
    async with staged(WIDE) as stage:
        assert "2 models split" in stage.text("#header")
        await stage.press("5")
        assert stage.shown() == {"chains", "peers", "jobs", "checkpoints", "events"}
        assert "✗ 7 of 28 layers missing" in stage.text("#chains")
        assert stage.text("#chains").count("missing") == 1
        stage.source.store.apply("parts-gone", [{"id": "peer1/llama-3.2-3b-1"}], 0.0)
        await stage.settle()
        assert stage.text("#chains").count("missing") == 2
        await stage.press("2")
        assert stage.shown() == {"ring", "training", "peers", "jobs", "checkpoints", "events"}
        forget(stage.source.store, "jobs")
        await stage.press("1")
        assert "chains" in stage.shown()
        forget(stage.source.store, "parts")
        await stage.settle()
        assert "ring" in stage.shown()
        assert "chains" not in stage.shown()


async def test_verifiers_take_the_place_of_the_ring_where_a_person_asks_for_them_or_nobody_trains():
    async with staged(WIDE, serving=True) as stage:
        assert "dora" not in stage.text("#ring"), "it is not there to train"
        assert "1 model served" in stage.text("#header")
        await stage.press("6")
        assert stage.shown() == {"serving", "peers", "jobs", "checkpoints", "events"}
        text = stage.text("#serving")
        for told in ("Serving · 1", "vera", "code-400m", "2 texts", "1 waiting", "dora", "code-15m", "83%"):
            assert told in text
        await stage.press("1", "end")
        forget(stage.source.store, "jobs")
        await stage.settle()
        assert "serving" in stage.shown()
        await stage.press("2")
        assert "ring" in stage.shown()
        await stage.pilot.resize_terminal(*COMPACT)
        await stage.press("1", "end")
        assert "verifier of code-400m · 2 sessions · 81% right" in stage.text("#peers")


# ---------------------------------------------------------------------------------------------------------- commands


async def test_the_keys_ask_the_seed_about_the_job_in_view():
    async with staged(WIDE) as stage:
        await stage.press("r", "s", "p")
        assert stage.source.requests == [(f"jobs.{verb}", {"job": "j1"}) for verb in ("resume", "save", "pause")]
        assert sum(notice.startswith("stdlib-30m: will") for notice in stage.notices()) == 3
        assert "■ paused" in stage.text("#jobs")


async def test_cancel_asks_first():
    async with staged() as stage:
        for keys, cancelled in ((["escape"], 0), (["n", "enter"], 0), (["y", "enter"], 1), (["up", "enter"], 2)):
            await stage.press("x")
            assert isinstance(stage.app.screen, PromptScreen)
            await stage.press("enter")
            assert isinstance(stage.app.screen, PromptScreen), "nothing is chosen at first"
            await stage.press(*keys)
            assert not isinstance(stage.app.screen, PromptScreen)
            assert stage.source.requests == [("jobs.cancel", {"job": job}) for job in ("j1", "j2")][:cancelled]


async def test_a_cancelled_job_is_the_one_that_was_asked_about():
    async with staged() as stage:
        store = stage.source.store
        await stage.press("x")
        done = [store.jobs["j1"].to_map() | {"state": "done"}, store.jobs["j2"].to_map() | {"state": "running"}]
        store.apply("jobs", done, 0.0)
        await stage.press("y", "enter")
        assert stage.source.requests == [("jobs.cancel", {"job": "j1"})]


async def test_a_new_job_is_created_from_a_profile_or_a_file_and_a_mistake_can_be_mended():
    async with staged() as stage:
        await stage.press("n", "enter", "T", "i", "enter")
        await stage.press("n", "down", "down", "enter")
        await stage.press("n")
        await stage.pilot.press(*"tiny", "space", *"speed", "equals_sign", "9")
        await stage.press("enter")
        assert stage.notices()[-1].startswith("Cannot create tiny: --set speed=9: unknown key speed\nthe tables")
        assert isinstance(stage.app.screen, PromptScreen)
        await stage.press(*["backspace"] * 11, *"a", "full_stop", *"toml", "enter")
        assert stage.source.requests == [
            ("tiny", {"text": "Ti"}),
            ("small", {"text": ""}),
            ("tiny", {"text": "tiny speed=9"}),
            ("", {"text": "ta.toml"}),
        ]
        assert not isinstance(stage.app.screen, PromptScreen)


async def test_a_job_is_restored_from_the_chosen_checkpoint():
    async with staged() as stage:
        await stage.press("R", "enter", "4", "backspace", "enter")
        assert isinstance(stage.app.screen, PromptScreen), "nothing is chosen without a word"
        await stage.press(*"400", "enter")
        assert stage.source.requests == [("checkpoints.restore", {"id": "j1@400@peer0"})]
        assert stage.notices() == ["stdlib-30m: goes back to the checkpoint"]
        stage.source.lose()
        await stage.press("R", "down", "enter")
        assert stage.notices()[-1].startswith("Cannot restore stdlib-30m: there is no connection")


async def test_the_filter_shows_only_matching_rows_and_acts_on_nothing_else():
    async with staged(WIDE) as stage:
        await stage.press("slash", *"TL")
        assert "Peers · 1 of 6 with TL" in stage.text("#peers"), "while it is typed"
        await stage.press("backspace", "backspace", *"400", "enter")
        assert "Checkpoints · 1 of 3 with 400" in stage.text("#checkpoints")
        assert "no row has 400" in stage.text("#peers")
        assert stage.app.job.id == "j1"
        await stage.press("slash", *["backspace"] * 3, *"hello", "enter")
        assert "Jobs · 1 of 3 with hello" in stage.text("#jobs")
        assert stage.app.query_one("#jobs-table").key_at_cursor == "", "not on a job that the keys do not act on"
        await stage.press("3", "down")
        assert stage.app.job.id == "j0"
        await stage.press("escape")
        assert "Jobs · 3" in stage.text("#jobs")
        await stage.press("slash", *"x", "escape")
        assert "Jobs · 3" in stage.text("#jobs")


async def test_a_chat_shows_the_answer_as_it_comes_and_escape_stops_it_and_then_leaves():
    async with staged(serving=True) as stage:
        pieces = stage.source.pieces
        await stage.press("c", *"why", "enter")
        pieces.put_nowait(" Because\x1b")
        await stage.settle()
        assert "Because�" in chat_of(stage)
        await stage.press(*"and", "enter")
        assert len(stage.source.asked) == 1, "one at a time"
        await stage.press("escape")
        assert "Because� (stopped)" in chat_of(stage)
        pieces.put_nowait("Then.")
        pieces.put_nowait("")
        await stage.press("enter")
        assert "Then." in chat_of(stage)
        pieces.put_nowait(UserError("no verifier is called vera", remedy="there is nobody"))
        await stage.press(*"so", "enter")
        assert "✗ no verifier is called vera; there is nobody" in chat_of(stage)
        await stage.press("escape")
        assert not isinstance(stage.app.screen, ChatScreen)
        first = [{"role": "user", "content": "why"}]
        second = [*first, {"role": "assistant", "content": "Because\x1b"}, {"role": "user", "content": "and"}]
        third = [*second, {"role": "assistant", "content": "Then."}, {"role": "user", "content": "so"}]
        assert [turns for _, turns in stage.source.asked] == [first, second, third]


async def test_a_chat_is_with_the_chosen_one_of_several_models():
    async with staged(serving=True) as stage:
        other = {"id": "v2/m2", "peer": "v2", "name": "vito", "model": "m2"}
        store = stage.source.store
        store.apply("serving", [store.serving["verifier/code-400m"].to_map() | other], 0.0)
        await stage.press("c", *"m2", "enter")
        await stage.press(*"why", "enter")
        assert [chosen for chosen, _ in stage.source.asked] == [("m2", "v2")]


def chat_of(stage: Stage) -> str:
    return "\n".join(strip.text for strip in stage.app.screen._compositor.render_strips())


async def test_the_cursor_in_jobs_chooses_the_job_in_view_and_a_refusal_is_shown_with_its_remedy():
    async with staged(WIDE) as stage:
        assert stage.source.watched == "j1"
        await stage.press("3")  # looking is not choosing
        done = stage.source.store.jobs["j1"].to_map() | {"state": "done"}
        runs = stage.source.store.jobs["j2"].to_map() | {"state": "running"}
        stage.source.store.apply("jobs", [done, runs], 0.0)
        await stage.settle()
        assert stage.source.watched == "j2"
        await stage.press("end", "p")
        assert stage.source.watched == "j0"
        assert "hello-tiny" in stage.text("#training").splitlines()[0]
        assert stage.source.requests == [("jobs.pause", {"job": "j0"})]
        told = "Cannot pause hello-tiny: job hello-tiny is done\nchoose a job that runs"
        assert any(told in notice for notice in stage.notices())


# --------------------------------------------------------------------------------------------------------- reconnect


async def test_the_whole_view_follows_the_job_that_the_user_chose():
    async with staged(WIDE, serving=True) as stage:
        store = stage.source.store
        store.apply("jobs", [store.jobs["j0"].to_map() | {"id": "j9", "created_at": 1.0}], 0.0)
        await stage.settle()
        stage.app.query_one("#jobs-table").focus()
        await stage.press("end")
        assert (stage.app.job.id, stage.app.job.state) == ("j9", "done")
        assert "ring" in stage.shown(), "its training and not what is served, although it has no ring"
        assert "Training · hello-tiny · done" in stage.text("#training")
        assert "no checkpoints yet" in stage.text("#checkpoints"), "those of the other job are not its own"
        store.apply("jobs-gone", [{"id": "j9"}], 0.0)
        await stage.settle()
        assert stage.app.job.id == "j1"
        assert stage.app.query_one("#jobs-table").key_at_cursor == "j1", "the keys act on the job under the cursor"


async def test_a_lost_seed_is_told_once_refuses_commands_and_is_live_again():
    async with staged(WIDE) as stage:
        stage.source.lose()
        await stage.settle(2)
        assert "✗ seed away 2 s · retry in 2 s" in stage.text("#header")
        assert stage.app.has_class("-stale")
        assert "atlas" in stage.text("#peers")
        stage.source.lose()
        await stage.settle(1)
        assert "✗ seed away 3 s" in stage.text("#header")
        assert [notice for notice in stage.notices() if "lost" in notice] == [
            "The seed was lost: the seed at 192.168.1.20:7337 closed the connection\n"
            "start it again with p2ptrain seed; training goes on without it"
        ]
        await stage.press("p", "x")
        assert not isinstance(stage.app.screen, PromptScreen)
        assert sum("there is no connection" in notice for notice in stage.notices()) == 2
        stage.source.connect()
        await stage.settle()
        assert "● live" in stage.text("#header")
        assert not stage.app.has_class("-stale")
        assert any(notice.startswith("The seed is back") for notice in stage.notices())
