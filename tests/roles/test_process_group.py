"""Every operation of the process group, with values, for every type and reduction."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future

from configs.schema import Profile
from p2ptrain import torch_backend
from p2ptrain.core.errors import DeadlineExceeded, UserError
from roles.process_group import GroupNetwork, start_host
from tests.roles.in_process import Cluster
from tests.roles.process_groups import TIMEOUT, everyone, group, host, new_group
from wire.transport import TcpNetwork

SIZES = {torch.float32: [1, 2, 3, 4, 5], torch.bfloat16: [2, 4, 5], torch.int64: [2, 3, 5]}  # of others: 3
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MOVED = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
NUMELS = [0, 7, 40_000]  # the last one is not a small operation, and has several sub-chunks
OPS = {
    "sum": (dist.ReduceOp.SUM, lambda all_: all_.sum(0)),
    "avg": (dist.ReduceOp.AVG, lambda all_: all_.sum(0) / len(all_)),
    "product": (dist.ReduceOp.PRODUCT, lambda all_: all_.prod(0)),
    "min": (dist.ReduceOp.MIN, lambda all_: all_.amin(0)),
    "max": (dist.ReduceOp.MAX, lambda all_: all_.amax(0)),
    "band": (dist.ReduceOp.BAND, lambda all_: _bitwise(torch.bitwise_and, all_)),
    "bor": (dist.ReduceOp.BOR, lambda all_: _bitwise(torch.bitwise_or, all_)),
    "bxor": (dist.ReduceOp.BXOR, lambda all_: _bitwise(torch.bitwise_xor, all_)),
}
OF_BITS = {"band", "bor", "bxor"}
CASES = [
    *((name, dtype) for name in OPS if name not in OF_BITS for dtype in FLOATS),
    *((name, dtype) for name in OPS if name != "avg" for dtype in INTEGERS),
    *((name, torch.bool) for name in ("band", "bor", "bxor", "min", "max")),
]


def _bitwise(operation: Any, rows: torch.Tensor) -> torch.Tensor:
    result = rows[0]
    for row in rows[1:]:
        result = operation(result, row)
    return result


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums and products every type holds exactly, but for float16's range."""
    draw = torch.Generator().manual_seed(seed)
    least = 0 if dtype in (torch.bool, torch.uint8) else -2
    drawn = torch.randint(least, 2 if dtype == torch.bool else 3, shape, generator=draw)
    return (drawn + 1j * drawn if dtype.is_complex else drawn).to(dtype)


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def expected(reduction: str, rows: torch.Tensor) -> torch.Tensor:
    dtype = rows.dtype
    exact = rows.to(torch.float64) if dtype.is_floating_point else rows.to(torch.int64)
    result = OPS[reduction][1](exact)
    return result.to(dtype) if dtype != torch.bool else result.bool()


@pytest.mark.parametrize(
    ("size", "reduction", "dtype"),
    [(size, name, dtype) for name, dtype in CASES for size in SIZES.get(dtype, [3])],
    ids=str,
)
def test_reductions(size: int, reduction: str, dtype: torch.dtype) -> None:
    members, op = group(size), OPS[reduction][0]
    for numel in NUMELS:
        rows = values(dtype, size, numel)
        reduced = expected(reduction, rows)
        buffers = [row.clone() for row in rows]
        everyone(members, lambda m, b=buffers: m.allreduce([b[m.rank()]], options(c10d.AllreduceOptions, reduceOp=op)))
        assert all(torch.equal(buffer, reduced) for buffer in buffers)

        buffers, root = [row.clone() for row in rows], size - 1
        opts = options(c10d.ReduceOptions, reduceOp=op, rootRank=root)
        everyone(members, lambda m, b=buffers, o=opts: m.reduce([b[m.rank()]], o))
        assert torch.equal(buffers[root], reduced)
        assert all(torch.equal(buffers[rank], rows[rank]) for rank in range(root)), "only the root's tensor changes"

        sources = values(dtype, size, size * numel, seed=1)
        before, outputs = sources.clone(), [torch.empty(numel, dtype=dtype) for _ in members]
        opts = options(c10d.ReduceScatterOptions, reduceOp=op)
        everyone(members, lambda m, o=outputs, s=sources, p=opts: m._reduce_scatter_base(o[m.rank()], s[m.rank()], p))
        parts = expected(reduction, sources).chunk(size) if numel else outputs
        assert all(torch.equal(output, part) for output, part in zip(outputs, parts, strict=True))
        assert torch.equal(sources, before), "the input stays as it is"
        for output in outputs:
            output.zero_()
        everyone(
            members,
            lambda m, o=outputs, s=sources, p=opts, n=numel: m.reduce_scatter(
                [o[m.rank()]], [list(s[m.rank()].reshape(m.size(), n))], p
            ),
        )
        assert all(torch.equal(output, part) for output, part in zip(outputs, parts, strict=True))


@pytest.mark.parametrize(
    ("size", "dtype"), [(size, dtype) for dtype in MOVED for size in SIZES.get(dtype, [3])], ids=str
)
def test_moves(size: int, dtype: torch.dtype) -> None:
    members = group(size)
    for numel in NUMELS:
        rows, root = values(dtype, size, numel), size // 2
        lists = [[torch.empty(numel, dtype=dtype) for _ in members] for _ in members]
        everyone(members, lambda m, o=lists, r=rows: m.allgather([o[m.rank()]], [r[m.rank()]], AllgatherOptions()))
        assert all(torch.equal(got, row) for outputs in lists for got, row in zip(outputs, rows, strict=True))

        outputs = [torch.empty(size * numel, dtype=dtype) for _ in members]
        everyone(members, lambda m, o=outputs, r=rows: m._allgather_base(o[m.rank()], r[m.rank()], AllgatherOptions()))
        assert all(torch.equal(output, rows.reshape(-1)) for output in outputs)

        buffers = [row.clone() for row in rows]
        opts = options(c10d.BroadcastOptions, rootRank=root)
        everyone(members, lambda m, b=buffers, o=opts: m.broadcast([b[m.rank()]], o))
        assert all(torch.equal(buffer, rows[root]) for buffer in buffers)

        gathered, opts = [torch.empty(numel, dtype=dtype) for _ in members], options(c10d.GatherOptions, rootRank=root)
        everyone(
            members,
            lambda m, g=gathered, r=rows, o=opts, t=root: m.gather([g] if m.rank() == t else [], [r[m.rank()]], o),
        )
        assert all(torch.equal(got, row) for got, row in zip(gathered, rows, strict=True))

        buffers, opts = [torch.empty(numel, dtype=dtype) for _ in members], options(c10d.ScatterOptions, rootRank=root)
        everyone(
            members,
            lambda m, b=buffers, r=rows, o=opts, t=root: m.scatter(
                [b[m.rank()]], [list(r)] if m.rank() == t else [], o
            ),
        )
        assert all(torch.equal(buffer, row) for buffer, row in zip(buffers, rows, strict=True))

        sources = [values(dtype, size * numel, seed=rank) for rank in range(size)]
        outputs = [torch.empty(size * numel, dtype=dtype) for _ in members]
        everyone(members, lambda m, o=outputs, s=sources: m.alltoall_base(o[m.rank()], s[m.rank()], [], []))
        for rank, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([source.reshape(size, -1)[rank] for source in sources]))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_uneven_all_to_all(size: int) -> None:
    members = group(size)
    counts = [[(source + 2 * target) % 4 for target in range(size)] for source in range(size)]
    sources = [values(torch.float32, sum(counts[rank]), 3, seed=rank) for rank in range(size)]
    taken = [[counts[source][rank] for source in range(size)] for rank in range(size)]
    outputs = [torch.empty(sum(taken[rank]), 3) for rank in range(size)]
    everyone(
        members, lambda m: m.alltoall_base(outputs[m.rank()], sources[m.rank()], taken[m.rank()], counts[m.rank()])
    )
    pieces = [source.split(counts[rank]) for rank, source in enumerate(sources)]
    for rank in range(size):
        assert torch.equal(outputs[rank], torch.cat([pieces[source][rank] for source in range(size)]))
    lists = [[torch.empty(count, 3) for count in taken[rank]] for rank in range(size)]
    everyone(members, lambda m: m.alltoall(lists[m.rank()], list(pieces[m.rank()])))
    assert all(torch.equal(lists[r][s], pieces[s][r]) for r in range(size) for s in range(size))


def test_messages_are_matched_by_source_and_tag() -> None:
    members = group(3)
    sent = [torch.full((5,), float(value)) for value in range(4)]
    got = [torch.empty(5) for _ in range(4)]
    sends = [members[0].send([sent[0]], 2, 7), members[0].send([sent[1]], 2, 8), members[1].send([sent[2]], 2, 7)]
    receives = [members[2].recv([got[1]], 0, 8), members[2].recv([got[2]], 1, 7), members[2].recv([got[0]], 0, 7)]
    for work in [*sends, *receives]:
        work.wait()
    assert all(torch.equal(got[index], sent[index]) for index in range(3))

    # Those that were sent before they are received.
    late = [members[0].send([sent[tag]], 2, tag) for tag in range(4)] + [members[1].send([sent[2]], 2, 0)]
    for tag, source in ((3, 0), (2, 0), (0, 1), (1, 0), (0, 0)):  # the last of rank 0 arrived, and so did the others
        tensor = torch.empty(5)
        members[2].recv([tensor], source, tag).wait()
        assert torch.equal(tensor, sent[2 if source else tag])
    for work in late:
        work.wait()

    anyone = members[2].recv_anysource([got[3]], 9)
    assert not anyone.is_completed()
    members[1].send([sent[3]], 2, 9).wait()
    anyone.wait()
    assert (anyone.source_rank(), float(got[3][0])) == (1, 3.0)


def test_messages_of_one_tag_keep_their_order() -> None:
    members = group(2)
    sent, got = [torch.full((3,), float(value)) for value in range(50)], [torch.empty(3) for _ in range(50)]
    works = [members[0].send([tensor], 1, 0) for tensor in sent] + [members[1].recv([tensor], 0, 0) for tensor in got]
    for work in works:
        work.wait()
    assert torch.equal(torch.stack(got), torch.stack(sent))


def test_a_message_of_another_size_fails_at_both_ends() -> None:
    members = new_group(2)
    send, receive = members[0].send([torch.zeros(4)], 1, 0), members[1].recv([torch.zeros(5)], 0, 0)
    with pytest.raises(RuntimeError, match="rank 0 sent 16 bytes with tag 0, but 20 are to be received"):
        receive.wait()
    with pytest.raises(RuntimeError, match=r"lost rank 1: .* 20 are to be received"):
        send.wait()


def test_tensors_that_are_not_contiguous() -> None:
    members = group(2)
    bases = [torch.full((4, 6), float(rank)) for rank in range(2)]
    views = [base.t()[1:3] for base in bases]
    everyone(members, lambda m: m.allreduce([views[m.rank()]]))
    assert all(torch.equal(view, torch.ones(2, 4)) for view in views)
    assert [float(base.sum()) for base in bases] == [8.0, 24.0], "elements beside the view stay"
    outputs = [[torch.zeros(4, 2).t(), torch.zeros(2, 4)] for _ in members]
    everyone(members, lambda m: m.allgather([outputs[m.rank()]], [torch.full((2, 4), float(m.rank()))]))
    assert all(
        torch.equal(output, torch.full((2, 4), float(rank))) for row in outputs for rank, output in enumerate(row)
    )


def test_memory_may_be_resized_after_an_operation() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    everyone(group(2), lambda m: m.allreduce([tensors[m.rank()]]))
    assert [tensor.resize_(5)[:3].tolist() for tensor in tensors] == [[2.0] * 3] * 2


def test_sparse_tensors_add_up() -> None:
    members = group(3)
    tensors = [
        torch.sparse_coo_tensor([[0, rank]], [[1.0, 2.0], [3.0, rank]], (4, 2), check_invariants=True)
        for rank in range(3)
    ]
    expected = sum(tensor.to_dense() for tensor in tensors)
    with ThreadPoolExecutor(3) as threads:  # it waits for the numbers of rows
        list(threads.map(lambda m: m.allreduce([tensors[m.rank()]]).wait(), members))
    assert all(torch.equal(tensor.to_dense(), expected) for tensor in tensors)
    maximum = options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="only sums sparse tensors"):
        members[0].allreduce([tensors[0]], maximum)


def test_coalesced_operations_and_barriers() -> None:
    members = group(3)
    pairs = [[torch.full((count,), float(m.rank())) for count in (2, 9)] for m in members]
    everyone(members, lambda m: m.allreduce_coalesced(pairs[m.rank()]))
    assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for pair in pairs for tensor in pair)
    outputs = [[torch.empty(6), torch.empty(27)] for _ in members]
    everyone(members, lambda m: m.all_gather_single_coalesced(outputs[m.rank()], pairs[m.rank()]))
    assert all(bool((tensor == 3).all()) for pair in outputs for tensor in pair)
    sums = [[torch.empty(2), torch.empty(9)] for _ in members]
    everyone(members, lambda m: m.reduce_scatter_single_coalesced(sums[m.rank()], outputs[m.rank()]))
    assert all(bool((tensor == 9).all()) for pair in sums for tensor in pair)
    early = [member.barrier() for member in members[:2]]
    assert not any(work.is_completed() for work in early)
    everyone([members[2]], lambda m: m.barrier())
    for work in early:
        work.wait()


def test_futures_have_the_tensors_and_their_callbacks_may_use_the_group() -> None:
    members = group(2)
    tensors = [torch.ones(3) for _ in members]

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        rank = next(rank for rank, tensor in enumerate(tensors) if tensor is future.value()[0])
        members[rank].allreduce([tensors[rank]]).wait()
        return tensors[rank]

    futures = [member.allreduce([tensors[member.rank()]]).get_future().then(again) for member in members]
    assert [future.wait().tolist() for future in futures] == [[4.0] * 3] * 2


def test_callbacks_of_any_number_of_futures_may_wait_for_others() -> None:
    (member, other), count = group(2), 40
    all_run = threading.Barrier(count)

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work = member.allreduce(future.value())
        all_run.wait(TIMEOUT.total_seconds())
        [tensor] = work.get_future().wait()
        return tensor

    futures = [member.allreduce([torch.ones(3)]).get_future().then(again) for _ in range(count)]
    for value in (1.0, 2.0):
        for _ in range(count):
            other.allreduce([torch.full((3,), value)])
    assert [future.wait().tolist() for future in futures] == [[4.0] * 3] * count


def test_code_in_cpp_sees_the_error_of_a_future() -> None:  # such as DDP without a hook in Python
    members = new_group(2)
    future = members[0].allreduce([torch.ones(3)]).get_future()
    members[1].shutdown()
    with pytest.raises(RuntimeError, match=r"DistBackendError: backend p2p: lost the .* neighbour rank 1"):
        future.wait()
    assert not _create_work_from_future(future).is_success()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_travel_as_copies() -> None:
    members = group(2)
    tensors = [torch.full((5,), member.rank() + 1.0, device="cuda") for member in members]
    outputs = [torch.zeros(10, device="cuda") for _ in members]
    parts = [[torch.zeros(5, device="cuda") for _ in members] for _ in members]
    everyone(members, lambda m: m._allgather_base(outputs[m.rank()], tensors[m.rank()]))
    everyone(members, lambda m: m.allgather([parts[m.rank()]], [tensors[m.rank()]]))
    everyone(members, lambda m: m._reduce_scatter_base(tensors[m.rank()], outputs[m.rank()]))
    everyone(members, lambda m: m.allreduce([outputs[m.rank()]]))
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 5, [4.0] * 5]
    assert [output.tolist() for output in outputs] == [[2.0] * 5 + [4.0] * 5] * 2
    assert [[it.tolist() for it in part] for part in parts] == [[[1.0] * 5, [2.0] * 5]] * 2


def test_what_is_refused_before_anything_is_sent() -> None:
    member = group(2)[0]
    floats, ints = torch.ones(3), torch.ones(3, dtype=torch.int64)
    refused = [
        (lambda: member.allreduce([ints], options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)), "a mean"),
        (lambda: member.allreduce([torch.ones(3, dtype=torch.complex64)]), "'complex64' cannot be reduced"),
        (lambda: member.allreduce([floats, floats]), "2 tensors where one is expected"),
        (lambda: member.broadcast([floats.to_sparse()]), "takes dense tensors"),
        (lambda: member._allgather_base(torch.ones(5), floats), "5 elements of torch.float32 are not those of 2"),
        (lambda: member._reduce_scatter_base(floats, torch.ones(5)), "5 elements of torch.float32 are not those of 2"),
        (lambda: member.allgather([[floats]], [floats]), "2 tensors of 3 elements"),
        (lambda: member.alltoall_base(floats, floats, [], []), "3 rows cannot be split evenly"),
        (lambda: member.alltoall([floats] * 3, [floats] * 3), "3 inputs and 3 outputs for 2 ranks"),
    ]
    for act, match in refused:
        with pytest.raises(ValueError, match=match):
            act()
    bits = options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.BAND)
    for work in [each.allreduce([torch.ones(3)], bits) for each in group(2)]:
        with pytest.raises(ValueError, match="bitwise_and is for integers"):
            work.wait()
    everyone(group(2), lambda m: m.allreduce([torch.ones(3)]))


def test_tensors_of_different_sizes_fail_with_what_to_do() -> None:
    works = [member.allreduce([torch.ones(3 + member.rank())]) for member in new_group(2)]
    errors = []
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        errors.append(str(caught.value))
    assert any("with equal shapes and types?" in error for error in errors), errors


def test_a_member_that_does_not_come_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 1, rank 2 did not come to the group within 0.1 s"):
        host(0).join(dist.HashStore(), "incomplete", 0, 3, ["rank 0", "rank 1", "rank 2"], 0.1)


def test_an_operation_that_does_not_end_in_time_names_who_is_late() -> None:
    members = new_group(2, timeout=timedelta(seconds=0.3))
    with pytest.raises(RuntimeError, match=r"left neighbour rank 1: sent no part of the all-reduce for 0.3 s"):
        members[0].allreduce([torch.ones(3)]).wait(TIMEOUT)
    members = new_group(2, timeout=timedelta(seconds=0.3))
    with pytest.raises(RuntimeError, match=r"no message with tag 4 within 0.3 s"):
        members[0].recv([torch.ones(3)], 1, 4).wait(TIMEOUT)
    with pytest.raises(RuntimeError, match=r"no message with tag 4 within 0.3 s"):
        members[0].send([torch.ones(3)], 1, 4).wait(TIMEOUT)
    work = new_group(2)[0].barrier()
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=0.1))


def test_members_of_other_machines_need_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr("roles.process_group._machine", lambda: f"machine {next(numbers)}")
    with pytest.raises(UserError, match=r"rank 1 runs on another machine, and connections .* must be encrypted"):
        new_group(2)


def test_a_member_that_left_fails_what_needs_it_and_nothing_else() -> None:
    members = new_group(3)
    tensor = torch.zeros(2)
    last = members[2].send([torch.ones(2)], 0, 0)
    members[0].recv([tensor], 2, 0).wait()
    last.wait()
    waiting = [members[0].allreduce([torch.ones(2)]), members[0].recv([tensor], 2, 0), members[1].recv([tensor], 2, 0)]
    members[2].shutdown()
    for work in waiting:
        with pytest.raises(RuntimeError, match="rank 2"):
            work.wait(TIMEOUT)
    with pytest.raises(RuntimeError, match="rank 2"):
        members[0].recv([tensor], 2, 0).wait()
    works = [members[1].send([torch.full((2,), 5.0)], 0, 1), members[0].recv([tensor], 1, 1)]
    for work in works:
        work.wait()
    assert tensor.tolist() == [5.0, 5.0]
    last_one = members[0].recv([tensor], 1, 1)
    members[1].shutdown()
    with pytest.raises(RuntimeError, match="lost rank 1"):
        last_one.wait(TIMEOUT)


async def test_the_seed_of_a_ticket_lists_a_group_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/who/train.py"])
    cluster = Cluster(tmp_path, TcpNetwork())
    await cluster.start_seed()

    async def open_network(peer_id: str) -> GroupNetwork:
        return GroupNetwork(TcpNetwork(), seed=cluster.address)

    async def until(state: str) -> list[dict[str, Any]]:
        """The members, as soon as the seed lists both with this state."""
        known: dict[str, dict[str, Any]] = {}

        def heard(topic: str, items: list[dict[str, Any]]) -> bool:
            known.update({item["id"]: item for item in items if topic == "peers"})
            return [item["state"] for item in known.values()] == [state] * 2

        await cluster._until("", heard)
        return sorted(known.values(), key=lambda item: str(item["name"]))

    await cluster.create(Profile.model_validate({"job": {"workers": 2}}))  # they are no workers for it
    hosts = [start_host(None, open_network) for _ in range(2)]
    try:
        members = await asyncio.to_thread(new_group, 2, hosts=hosts.__getitem__)
        found = await until("training")
        assert [item["name"] for item in found] == ["train.py rank 0", "train.py rank 1"]
        assert [(item["roles"], item["rank"], item["job"]) for item in found] == [
            (["group member"], 0, ""),
            (["group member"], 1, ""),
        ]
        assert len({item["group"] for item in found}) == 1
        await cluster.stop_seed()
        tensors = [torch.ones(3), torch.ones(3)]
        await asyncio.to_thread(everyone, members, lambda member: member.allreduce([tensors[member.rank()]]))
        assert tensors[1].tolist() == [2.0] * 3
        await cluster.start_seed(cluster.address[1])
        await until("training")
        for member in members:
            await asyncio.to_thread(member.shutdown)
        await until("left")
    finally:
        await cluster.close()


@pytest.mark.parametrize("ticket", ["wrongSecret", "a secret", "10.0.0.1:7337/AbCdEfGh"])
async def test_what_is_no_ticket_is_not_repeated(monkeypatch: pytest.MonkeyPatch, ticket: str) -> None:
    monkeypatch.setenv("P2PTRAIN_TICKET", ticket)
    with pytest.raises(UserError, match="P2PTRAIN_TICKET does not lead to a seed") as caught:
        await torch_backend._open_network("0" * 12)
    text = f"{caught.value} {caught.value.remedy}"
    assert not any(part in text for part in ("wrong", "a secret", "AbCd"))
