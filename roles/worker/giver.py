"""Giving a model's tensors to others: its table by pages, its bytes by ranges, with one range in memory at a time.

A client gives over a connection that it dialled (purpose ``give``), a worker to whoever dials it (purpose ``model``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from p2ptrain.core.errors import DeadlineExceeded, ProtocolError, StorageError
from p2ptrain.core.texts import shortened
from p2ptrain.core.threads import Thread
from roles.model_directory import ModelDirectory
from roles.model_table import RANGE_BYTES, page_of
from roles.worker.stage_links import QUIET_S, Line
from wire.chain_messages import TensorGone, TensorRequest, TensorsPage, TensorsRequest
from wire.connection import Connection

GIVEN_NO_MORE = "the model is not given here any more: whoever had it given is gone"


async def give(
    connection: Connection,
    model: ModelDirectory,
    disk: Thread,
    *,
    silence_s: float = QUIET_S,
    still: Callable[[], bool] = lambda: True,
) -> int:
    """Answer one receiver until it closes; bytes of tensors given.

    Args:
        disk: the thread that reads.
        still: whether it is to be given; what is asked for afterwards is refused.

    Raises:
        ProtocolError: it asked for what there is not.
        DeadlineExceeded: it was silent for too long, or takes no bytes.
    """
    line, given_bytes = Line(connection, silence_s), 0
    async with line.alive():
        async for message in line.messages():
            match message:
                case TensorsRequest() if not still():
                    connection.send(TensorsPage(0, [], GIVEN_NO_MORE))
                case TensorRequest() if not still():
                    connection.send(TensorGone(message.stream, GIVEN_NO_MORE))
                case TensorsRequest(name, first) if name == model.model and 0 <= first < len(model.records):
                    connection.send(page_of(model.records, first))
                case TensorsRequest(name):
                    connection.send(TensorsPage(0, [], f"model {name[:40]} is not what is given here"))
                case TensorRequest(name) if name == model.model:
                    read = partial(model.read, message.name, message.start, message.stop)
                    given_bytes += await give_range(connection, read, disk, message, silence_s)
                case _:
                    raise ProtocolError(f"a receiver of tensors sent {type(message).__name__}, or of another model")
    return given_bytes


async def give_range(
    connection: Connection, read: Callable[[], bytes | bytearray], disk: Thread, asked: TensorRequest, silence_s: float
) -> int:
    """Send what ``read`` gives as the range that was asked for; its bytes. Raises as ``give``."""
    size = asked.stop - asked.start
    if not 0 <= asked.start < asked.stop or size > RANGE_BYTES or not 0 <= asked.stream < 1 << 31:
        raise ProtocolError(f"bytes {asked.start} to {asked.stop} are asked for; {RANGE_BYTES} at a time are given")
    try:
        data = await disk.submit(read)
    except StorageError as problem:
        connection.send(TensorGone(asked.stream, shortened(problem.message)))
        return 0
    connection.send_bulk(memoryview(data), generation=0, stream=asked.stream)
    left = connection.unsent_bytes
    while left:  # it may be slow, as long as it takes something
        try:
            await connection.flush(timeout_s=silence_s)
        except DeadlineExceeded:
            if connection.unsent_bytes >= left:
                raise
        left = connection.unsent_bytes
    return size
