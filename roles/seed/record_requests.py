"""The operators' requests for what was recorded: the ledger, views, interruptions, metrics and events."""

from __future__ import annotations

import dataclasses

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded
from roles.seed.events import first_that_fit, newest_that_fit
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobController
from roles.seed.operator_api import Method, Params, Result, text_of, whole_of
from roles.seed.overview import Overview
from roles.seed.store import RECOVERIES_KEPT, Records, SeedStore
from wire.connection import Connection
from wire.records import runs_of

MAX_ROWS = 200


class RecordRequests:
    def __init__(self, store: SeedStore, jobs: JobTable, overview: Overview) -> None:
        self._store, self._jobs, self._overview = store, jobs, overview

    def methods(self) -> dict[str, Method]:
        return {
            "jobs.ledger": self._jobs_ledger,
            "jobs.views": self._jobs_views,
            "recoveries.list": self._recoveries_list,
            "metrics.history": self._metrics_history,
            "events.list": self._events_list,
        }

    async def watch(self, connection: Connection) -> None:
        """Send updates until cancelled, after the newest rows of jobs that are not over."""
        with self._overview.watching() as updates:
            updates.add(self._overview.recent_events())
            controllers = self._jobs.controllers
            live = [controller.id for controller in controllers.values() if controller.live]
            for job in (live or list(controllers)[-1:])[:4]:
                updates.add(await self._store.call(Records.last_metrics, job, 300))
                updates.add(await self._store.call(Records.recoveries, job, 100))
            try:
                await updates.run(connection)
            except DeadlineExceeded as slow:
                connection.abort(DeadlineExceeded(f"a subscriber was dropped: {slow.message}", remedy=slow.remedy))
            except ConnectionLost:
                pass  # ``OperatorApi.serve`` sees the loss too

    def _find(self, params: Params) -> JobController:
        return self._jobs.find(text_of(params, "job", 128))

    async def _jobs_ledger(self, params: Params, connection: Connection) -> Result:
        controller, after = self._find(params), whole_of(params, "after_step", 0, 0, 2**53)
        head = await self._store.call(Records.ledger_head, controller.id)
        rows = await self._store.call(Records.ledger_rows, controller.id, after, 512)
        runs = (run.to_map() for run in runs_of(rows))
        begins = dataclasses.asdict(head) if head else None
        return {"head": begins, "runs": first_that_fit(runs), "windows": controller.record.windows}

    async def _jobs_views(self, params: Params, connection: Connection) -> Result:
        controller, after = self._find(params), whole_of(params, "after_generation", 0, 0, 2**53)
        views = await self._store.call(Records.views, controller.id, after, MAX_ROWS)
        items = [dataclasses.asdict(view) | {"members": list(view.members)} for view in views]
        return {"views": first_that_fit(items)}

    async def _recoveries_list(self, params: Params, connection: Connection) -> Result:
        controller, limit = self._find(params), whole_of(params, "limit", MAX_ROWS, 1, RECOVERIES_KEPT)
        found = await self._store.call(Records.recoveries, controller.id, limit)
        return {"recoveries": newest_that_fit(item.to_map() for item in found), "total": len(found)}

    async def _metrics_history(self, params: Params, connection: Connection) -> Result:
        controller, limit = self._find(params), whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        after = whole_of(params, "after_step", -1, -1, 2**53)
        rows = await self._store.call(Records.metrics, controller.id, after, limit)
        return {"rows": [row.to_map() for row in rows]}

    async def _events_list(self, params: Params, connection: Connection) -> Result:
        after = whole_of(params, "after_id", 0, -MAX_ROWS, 2**53)
        limit = whole_of(params, "limit", MAX_ROWS, 1, MAX_ROWS)
        if after < 0:  # so many of the newest ones
            last = await self._store.call(Records.last_event_id)
            events = await self._store.call(Records.events, last + after, limit)
            return {"events": newest_that_fit(event.to_map() for event in events)}
        events = await self._store.call(Records.events, after, limit)
        return {"events": first_that_fit(event.to_map() for event in events)}
