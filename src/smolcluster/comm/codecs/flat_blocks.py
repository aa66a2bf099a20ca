"""blocktopk of many tensors together. Method and format: `block_topk.py`.

One top-k for all blocks of one size. Then every kept number is an *element* of one list, tensor by tensor, and the rest is done
for all elements at once: bins, gaps, and the position of each element's bits in the payload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import check_magnitude
from smolcluster.comm.codecs.bins import Segments, quantized
from smolcluster.comm.codecs.bits import add_fields, ones_of, read_fields
from smolcluster.comm.codecs.block_topk import BLOCK, MAX_RICE, TILE, Blocks, BlockTopK
from smolcluster.comm.codecs.flat import Decoded, FlatEncoding, piece_of

BATCH_NUMBERS = 2**27  # numbers in one batch, which bounds the memory for elements


class FlatBlocks(FlatEncoding):
    codec: BlockTopK

    def _place(self) -> tuple[list[int], int]:
        """Cut the tensors into batches. After each is one spare number, which values of padding are written to."""
        batches: list[list[int]] = [[]]
        for index, count in enumerate(self._counts):
            if batches[-1] and sum(self._counts[i] for i in batches[-1]) + count > BATCH_NUMBERS:
                batches.append([])
            batches[-1].append(index)
        self._batches: list[BlockBatch] = []
        offsets, end = [], 0
        for batch in batches:
            for index in batch:
                offsets.append(end)
                end += self._counts[index]
            places = [(self.shapes[index], offsets[index]) for index in batch]
            self._batches.append(BlockBatch(self.codec, places, spare=end))
            self.padding.append(slice(end, end + 1))
            end += 1
        return offsets, end

    def _encode(self, flat: Tensor) -> tuple[Tensor, Iterator[Decoded]]:
        views = iter(self.views(flat))
        of_batches = ((batch, list(itertools.islice(views, batch.size))) for batch in self._batches)
        encoded = [batch.encode(tensors) for batch, tensors in of_batches if batch.nbytes]
        return torch.cat([payload for payload, _ in encoded]), (part for _, part in encoded)

    def _decode(self, data: Tensor) -> Iterator[Decoded] | None:
        parts = torch.split(data, [batch.nbytes for batch in self._batches])
        found: list[Decoded] = []
        for batch, part in zip(self._batches, parts, strict=True):
            if batch.nbytes:
                decoded = batch.decode(part)
                if decoded is None:
                    return None
                found.append(decoded)
        return iter(found)


@dataclass(frozen=True, slots=True)
class Tables:
    """Index tables of a batch, which depend on its shapes only, on one device. Positions are bytes of its payload.

    Elements are in the order of `BlockBatch`, which is not that of the payload.
    """

    tensors: Segments
    local: Tensor  # of each element: its number within its tensor
    slot: Tensor  # of each tensor: where its bytes begin
    codes: Tensor  # where its codes, or kept numbers, begin
    gaps: Tensor  # where the coded gaps begin
    end: Tensor  # where its bytes end
    tensor: Tensor  # of each block: its tensor
    block: Tensor  # of each element: its block
    first: Tensor  # of each block: its first element
    last: Tensor  # and its last one
    limit: Tensor  # of each block: its size
    # The number at place p of a block belongs to p >> shift rows below its first one, and to p % 2^shift numbers right of it.
    start: Tensor  # where its first number is in the flat buffer
    columns: Tensor  # of its tensor
    shift: Tensor
    height: Tensor  # rows and columns that are not padding
    width: Tensor

    def spread(self, of_blocks: Tensor) -> Tensor:
        """Return for each element the value of its block."""
        return of_blocks.index_select(0, self.block)


class BlockBatch:
    """Tensors that are encoded at once, in the order of their block sizes: equal ones share a top-k."""

    def __init__(self, codec: BlockTopK, places: Sequence[tuple[Sequence[int], int]], *, spare: int) -> None:
        """`places`: shape of each tensor, and where it begins in the flat buffer. `spare`: the number after them."""
        self._codec, self._spare, self.size = codec, spare, len(places)
        sizes = [codec.nbytes(shape) for shape, _ in places]
        *slots, self.nbytes = itertools.accumulate(sizes, initial=0)
        blocks = [Blocks.of(shape) for shape, _ in places]
        self._order = sorted((i for i in range(self.size) if blocks[i].count), key=lambda i: blocks[i].size)
        self._blocks = [blocks[i] for i in self._order]
        self._offsets = [places[i][1] for i in self._order]
        self._kept = [codec.kept(each) for each in self._blocks]
        self._slots, self._sizes = [slots[i] for i in self._order], [sizes[i] for i in self._order]
        self._books = 2 * 2**codec.bits if codec.bits else 0  # bytes of a codebook
        self._tables: dict[torch.device, Tables] = {}

    def encode(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Decoded]:
        """Return the payload, and what it decodes to."""
        places, values, peaks = self._largest([tensors[i] for i in self._order])
        tables = self._on(places.device)
        data = torch.zeros(self.nbytes + 2, dtype=torch.int32, device=places.device)
        values = self._put_values(data, values, peaks, tables)
        self._put_gaps(data, places, tables)
        return data[: self.nbytes].to(torch.uint8), self._placed(places, values, tables)

    def decode(self, data: Tensor) -> Decoded | None:
        """Decode a payload; None if it may be invalid."""
        tables = self._on(data.device)
        gaps = self._gaps(data, tables)
        if gaps is None:
            return None
        values = self._values(data, tables)
        through = gaps.add_(1).cumsum(0)
        before = through[tables.first] - gaps[tables.first]
        places = through.sub_(tables.spread(before)).sub_(1)
        valid = (places[tables.last] < tables.limit).all() & values.isfinite().all()
        if not bool(valid):
            return None
        return self._placed(places, values, tables)

    def _placed(self, places: Tensor, values: Tensor, tables: Tables) -> Decoded:
        """Return the values at their places in the flat buffer. `places`, of elements in their block, are overwritten."""
        shift = tables.spread(tables.shift)
        down = places >> shift
        right = places.sub_(down << shift)
        inside = (down < tables.spread(tables.height)) & (right < tables.spread(tables.width))
        where = right.add_(tables.spread(tables.start)).add_(down.mul_(tables.spread(tables.columns)))
        return Decoded(torch.where(inside, values, 0.0), torch.where(inside, where, self._spare))

    def _largest(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return place and value of every element, and the largest magnitude of each tensor."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for run in self._runs(piece_of(tensors[0].device)):
            cut = [self._blocks[i].cut(tensors[i]) for i in run]
            rows = torch.cat(cut) if len(cut) > 1 else cut[0]
            places = rows.abs().topk(self._kept[run[0]], dim=1, sorted=False).indices.sort(dim=1).values
            values = rows.gather(1, places)
            found.append((places.view(-1), values.view(-1), values.abs().amax(dim=1)))
        places, values, peaks = (torch.cat(each) for each in zip(*found, strict=True))
        # Magnitudes are ordered as their bits are.
        highest = torch.zeros(len(tensors), dtype=torch.int32, device=peaks.device)
        highest.scatter_reduce_(0, self._on(peaks.device).tensor, peaks.view(torch.int32), "amax")
        return places, values, highest.view(torch.float32)

    def _runs(self, most: int) -> Iterator[list[int]]:
        """Tensors with blocks of one size: one tensor, or several with at most this many numbers together."""
        run: list[int] = []
        numel = 0
        for i, blocks in enumerate(self._blocks):
            more = blocks.count * blocks.size
            if run and (blocks.size != self._blocks[run[0]].size or numel + more > most):
                yield run
                run, numel = [], 0
            run.append(i)
            numel += more
        yield run

    def _put_values(self, data: Tensor, values: Tensor, peaks: Tensor, tables: Tables) -> Tensor:
        """Write the values. Return them as they are decoded."""
        tensors, bits = tables.tensors, self._codec.bits
        start = tensors.spread(tables.codes * 8)
        if not bits:
            narrow = to_bf16(values)
            add_fields(data, start + 16 * tables.local, narrow.view(torch.int16).long() & 0xFFFF, width=16)
            return narrow.float()
        codes, means = quantized(values, tensors, peaks, bits)
        books = to_bf16(means)
        data[self._book_places(tables)] = books.view(torch.uint8).view(len(tensors), -1).int()
        add_fields(data, start + bits * tables.local, codes, width=bits)
        return self._looked_up(books, codes, tables)

    def _put_gaps(self, data: Tensor, places: Tensor, tables: Tables) -> None:
        tensors = tables.tensors
        gaps = torch.diff(places, prepend=places[:1]).sub_(1)
        gaps[tables.first] = places[tables.first]
        r = rice_parameters(gaps, tensors)
        data[tables.slot] = r.int()
        each = tensors.spread(r)
        start = tensors.spread(tables.gaps * 8)
        add_fields(data, start + each * tables.local, gaps & ((1 << each) - 1), width=MAX_RICE)
        ends = ((gaps >> each) + 1).cumsum(0)
        before = torch.cat([ends.new_zeros(1), ends])[tensors.starts]
        unary = (tables.gaps + (tensors.counts * r + 7) // 8) * 8 - before - 1
        positions = tensors.spread(unary) + ends
        add_fields(data, positions, torch.ones_like(positions), width=1)

    def _values(self, data: Tensor, tables: Tables) -> Tensor:
        tensors, bits = tables.tensors, self._codec.bits
        start = tensors.spread(tables.codes * 8)
        if not bits:
            words = read_fields(data, start + 16 * tables.local, 16)
            return words.to(torch.int16).view(torch.bfloat16).float()
        books = data[self._book_places(tables)].view(torch.bfloat16)
        return self._looked_up(books, read_fields(data, start + bits * tables.local, bits), tables)

    def _book_places(self, tables: Tables) -> Tensor:
        """Return where the bytes of each tensor's codebook are."""
        return tables.slot[:, None] + 1 + torch.arange(self._books, device=tables.slot.device)

    def _looked_up(self, books: Tensor, codes: Tensor, tables: Tables) -> Tensor:
        return books.float().view(-1).index_select(0, (tables.tensors.of << self._codec.bits).add_(codes))

    def _gaps(self, data: Tensor, tables: Tables) -> Tensor | None:
        """Decode the gaps; None if there are too few."""
        tensors = tables.tensors
        r = data[tables.slot].long()
        start = torch.minimum(tables.gaps + (tensors.counts * r + 7) // 8, tables.end)
        # 1 from where the unary part of a tensor begins to where its bytes end.
        edges = torch.zeros(self.nbytes + 1, dtype=torch.int32, device=data.device)
        edges.index_add_(0, start, torch.ones_like(start, dtype=torch.int32))
        edges.index_add_(0, tables.end, -torch.ones_like(start, dtype=torch.int32))
        ones = ones_of(torch.where(edges.cumsum(0)[:-1] > 0, data, 0))
        first, last = torch.searchsorted(ones, start * 8), torch.searchsorted(ones, tables.end * 8)
        if not bool(((last - first >= tensors.counts) & (r <= MAX_RICE)).all()):
            return None
        positions = ones.index_select(0, tensors.spread(first) + tables.local)
        high = torch.diff(positions, prepend=positions[:1]).sub_(1)
        high[tensors.starts] = positions[tensors.starts] - start * 8
        each = tensors.spread(r)
        return (high << each) | read_fields(data, tensors.spread(tables.gaps * 8) + each * tables.local, each)

    def _on(self, device: torch.device) -> Tables:
        if device not in self._tables:
            self._tables[device] = self._tables_on(device)
        return self._tables[device]

    def _tables_on(self, device: torch.device) -> Tables:
        def per_tensor(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device)

        def per_block(values: Iterable[int]) -> Tensor:
            return per_tensor(values)[tensor]

        blocks, slots = self._blocks, per_tensor(self._slots)
        counts, kept = [each.count for each in blocks], self._kept
        tensor = torch.repeat_interleave(per_tensor(counts))
        number = torch.cat([torch.arange(count, device=device) for count in counts])  # of each block in its tensor
        totals = [count * k for count, k in zip(counts, kept, strict=True)]
        elements = Segments(totals, device)
        lengths = per_block(kept)
        heads = per_tensor(map(self._codec.head_bytes, totals))
        tiled = per_block(each.tiled for each in blocks).bool()
        across = per_block(each.tiles_across for each in blocks)
        y, x = (
            torch.where(tiled, number // across * TILE, 0),
            torch.where(tiled, number % across * TILE, number * BLOCK),
        )
        rows = per_block(each.shape[0] if each.tiled else 1 for each in blocks)
        columns = per_block(each.shape[1] if each.tiled else math.prod(each.shape) for each in blocks)
        return Tables(
            tensors=elements,
            local=torch.arange(sum(totals), device=device) - elements.starts[elements.of],
            slot=slots,
            codes=slots + 1 + self._books,
            gaps=slots + heads,
            end=slots + per_tensor(self._sizes),
            tensor=tensor,
            block=torch.repeat_interleave(lengths, output_size=sum(totals)),
            first=lengths.cumsum(0) - lengths,
            last=lengths.cumsum(0) - 1,
            limit=per_block(each.size for each in blocks),
            start=per_block(self._offsets) + y * columns + x,
            columns=columns,
            shift=torch.where(tiled, TILE.bit_length() - 1, BLOCK.bit_length() - 1),
            height=torch.where(tiled, rows - y, 1),
            width=columns - x,
        )


def rice_parameters(gaps: Tensor, tensors: Segments) -> Tensor:
    """Return for each tensor the parameter that takes the fewest bytes; the lowest of equal ones."""
    counts = torch.zeros(len(tensors) * BLOCK, dtype=torch.int32, device=gaps.device)
    counts.index_add_(0, tensors.of * BLOCK + gaps, torch.ones_like(gaps, dtype=torch.int32))
    r = torch.arange(MAX_RICE + 1, device=gaps.device)
    high = torch.arange(BLOCK, device=gaps.device)[:, None] >> r
    sums = (counts.view(-1, BLOCK).double() @ high.double()).long()  # exact: integers below 2^53
    total = tensors.counts[:, None]
    nbytes = (total * r + 7) // 8 + (total + sums + 7) // 8
    return (nbytes * (MAX_RICE + 1) + r).argmin(dim=1)


def to_bf16(values: Tensor) -> Tensor:
    """Round to bf16. Raises CodecError if a number becomes infinite."""
    narrow = values.to(torch.bfloat16)
    check_magnitude(narrow, limit=math.inf, name="bfloat16")
    return narrow
