"""How an array is cut: into stripes, one a lane, and each stripe into sub-chunks. A pure function of sizes that all
members share, so all of them cut alike.
"""

from __future__ import annotations

from ring.collectives import owned_range

LEAST_SUB_CHUNK_BYTES, MOST_SUB_CHUNK_BYTES = 64 << 10, 512 << 10
"""Between these a session chooses by itself. Measured on a loopback: below, the work per sub-chunk counts; above, sums
leave a core's cache before they are sent on."""
SUB_CHUNKS_A_CHUNK = 4  # at least: so that adding one overlaps with receiving the next
WINDOW_BYTES = 1 << 20
"""What a member may have sent between a sub-chunk's arrival and its being passed on. More leaves the cache; less has
neighbours wait for one another. Less than the kernel's buffers, so that sending seldom has to wait for them."""


def cut(
    numel: int, itemsize: int, *, members: int, lanes: int, sub_chunk_bytes: int = 0, block_numel: int = 1
) -> list[tuple[int, int, int, int]]:
    """The parts of an array of ``numel`` elements, for an all-reduce.

    Where the sub-chunk is given the link is a far one, and chunks go one after the other: who waits for the next one
    has a whole chunk to pass on meanwhile, however long a hop takes.

    Args:
        lanes: there are; as many are used as give each chunk of each stripe a sub-chunk of its own.
        block_numel: sub-chunks are multiples of it, a codec's block.

    Returns:
        (start, stop, elements of a sub-chunk, segments on their way at a time) of each stripe; none where there is no
        lane.
    """
    stripes = min(lanes, max(1, numel * itemsize // (members * (sub_chunk_bytes or LEAST_SUB_CHUNK_BYTES))))
    most_bytes = MOST_SUB_CHUNK_BYTES // (1 if block_numel == 1 else 2)  # coding has scratch of its own in the cache
    most_bytes = max(most_bytes // max(stripes, 1), LEAST_SUB_CHUNK_BYTES)
    parts = []
    for lane in range(stripes):
        start, stop = owned_range(lane, stripes, numel)
        chunk_bytes = -(-(stop - start) // members) * itemsize
        fitting_bytes = min(max(chunk_bytes // SUB_CHUNKS_A_CHUNK, LEAST_SUB_CHUNK_BYTES), most_bytes)
        sub_chunk_numel = max((sub_chunk_bytes or fitting_bytes) // itemsize // block_numel, 1) * block_numel
        segments = max(-(-chunk_bytes // (sub_chunk_numel * itemsize)), 1)
        a_segment_bytes = (2 * members - 2) * sub_chunk_numel * itemsize
        depth = segments if sub_chunk_bytes else min(-(-WINDOW_BYTES // max(a_segment_bytes, 1)), segments)
        parts.append((start, stop, sub_chunk_numel, depth))
    return parts
