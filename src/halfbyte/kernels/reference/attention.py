"""Causal attention over paged keys and values, with an online softmax over tiles of 16 keys (definition of the bits).

Per query, head and tile of 16 keys by absolute position (arXiv 1805.02867, 2205.14135 for the online softmax):

    s_j = (q . k_j) * scale        summed over d in order, float32, multiply then add
    m' = max(m, max_j s_j);  alpha = exp(m - m');  p_j = exp(s_j - m');  l = l * alpha + p_0 + p_1 + ... in order
    acc = acc * alpha;  acc = acc + p_j * v_j for j in order
    out = acc / l + 0              (the last addition turns -0 into +0)

Masked keys take part in nothing. FP4 pages (our own order; products with grid values are exact, so fused multiply-adds
give the same bits): q' = round22(q); per block of 16 dimensions t = sum of q'_d * grid in order; q . k = (sum over
blocks of t * e4m3, in order) * global; values use w_j = head22(p_j * e4m3_j), where a p_j below 2^-80 counts as 0,
acc = acc + w_j * grid and out = (acc * global) / l + 0.

The reference is vectorised over sequences, heads and queries, which are the last dimensions of every tensor below, and
loops over keys and dimensions; so its value cannot depend on what shares the batch or on the page size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats import decode_e2m1, decode_e4m3
from halfbyte.kernels.kv import TILE, KvLayer
from halfbyte.kernels.reference.elementary import exp, head22, round22

__all__ = ["attention", "check_attention"]

_CHUNK = 64  # queries of one sequence that share a pass over the keys
_ROWS = 16384  # (sequence, head, query) rows processed together


def check_attention(q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor) -> None:
    """Raise ShapeError unless the shapes fit and every page that a query can see exists."""
    s = context_len.numel()
    shapes = (
        f"q {tuple(q.shape)}, page_table {tuple(page_table.shape)}, query_start {tuple(query_start.shape)}, "
        f"context_len {tuple(context_len.shape)}, layer n_kv {layer.n_kv} head_dim {layer.head_dim}"
    )
    if (
        q.ndim != 3
        or q.shape[2] != layer.head_dim
        or q.shape[1] % layer.n_kv
        or query_start.shape != (s + 1,)
        or page_table.ndim != 2
        or page_table.shape[0] != s
        or context_len.ndim != 1
    ):
        raise ShapeError(
            "attention: shapes do not fit",
            where=shapes,
            expected="q [T, H, D] with H a multiple of n_kv, page_table [S, P], query_start [S+1], context_len [S]",
        )
    counts = query_start.diff()
    if int(query_start[0]) != 0 or int(query_start[-1]) != q.shape[0] or bool((counts < 0).any()):
        raise ShapeError(
            "attention: query_start must rise from 0 to T", where=f"query_start {query_start.tolist()}, T {q.shape[0]}"
        )
    if bool((context_len < counts).any()) or bool((context_len > page_table.shape[1] * layer.page_size).any()):
        bad = int(((context_len < counts) | (context_len > page_table.shape[1] * layer.page_size)).nonzero()[0])
        raise ShapeError(
            "attention: a context does not fit its pages",
            where=f"sequence {bad}: context_len {int(context_len[bad])}, queries {int(counts[bad])}",
            expected=f"queries <= context_len <= {page_table.shape[1]} pages x {layer.page_size}",
        )
    used = torch.arange(page_table.shape[1]) * layer.page_size < context_len.unsqueeze(1)
    wrong = used & ((page_table < 0) | (page_table >= layer.n_pages))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ShapeError(
            "attention: a page does not exist",
            where=f"page_table[{row}, {column}] = {int(page_table[row, column])}",
            expected=f"0..{layer.n_pages - 1}",
        )


def attention(
    q: Tensor, layer: KvLayer, page_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float
) -> Tensor:
    """Causal attention of q [T, H, D] (float32) to the pages of each sequence; [T, H, D] float32.

    Arguments:
        page_table: [S, P] int32, pages of each sequence in order; entries beyond the context are ignored.
        query_start: [S + 1] int32, rows of q that belong to each sequence.
        context_len: [S] int32, keys present, own ones included: query i of n sees keys 0 .. context_len - n + i.
        scale: factor on the scores (rounded to float32).
    Raises: ShapeError.
    """
    check_attention(q, layer, page_table, query_start, context_len)
    out = torch.zeros_like(q)
    start, context = query_start.numpy().astype(np.int64), context_len.numpy().astype(np.int64)
    counts = np.diff(start)
    chunks = -(-counts // _CHUNK)
    sequence = np.repeat(np.arange(len(counts)), chunks)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * _CHUNK
    first, count = start[sequence] + offset, np.minimum(counts[sequence] - offset, _CHUNK)
    visible = (context - counts)[sequence] + offset + 1  # keys seen by the chunk's first query
    width = 1 << np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64)
    for w in np.unique(width):
        items = np.flatnonzero(width == w)
        items = items[np.argsort(-(visible[items] + count[items]), kind="stable")]
        step = max(1, _ROWS // (int(w) * q.shape[1]))
        for b in range(0, len(items), step):
            part = items[b : b + step]
            lane = np.minimum(np.arange(w), count[part, None] - 1)
            seen = np.where(np.arange(w) < count[part, None], visible[part, None] + lane, 0)
            rows = torch.from_numpy(first[part, None] + lane)
            result = _attend(
                q[rows], layer, page_table[torch.from_numpy(sequence[part])], torch.from_numpy(seen), scale
            )
            real = torch.from_numpy(np.arange(w) < count[part, None])
            out[rows[real]] = result[real]
    return out


def _attend(q: Tensor, layer: KvLayer, pages: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [G, w, H, D], pages [G, P], seen [G, w] keys visible (0 = padding), longest context first; like q."""
    g, w, heads, d = q.shape
    r = heads // layer.n_kv
    rows = q.reshape(g, w, layer.n_kv, r, d).permute(4, 0, 2, 3, 1).reshape(d, g, layer.n_kv, r * w).contiguous()
    if layer.kind == "fp4":
        rows = round22(rows)
    seen_rows = seen.unsqueeze(1).expand(g, r, w).reshape(g, 1, r * w)
    last = seen.amax(1)
    m = torch.full(rows.shape[1:], -torch.inf)
    length = torch.zeros_like(m)
    acc = torch.zeros_like(rows)
    factor = torch.tensor(scale, dtype=torch.float32)
    tiles_per_page = layer.page_size // TILE
    for t in range(-(-int(last.max()) // TILE)):
        n = int((last > t * TILE).sum())
        where = (pages[:n, t // tiles_per_page].long(), t % tiles_per_page)  # pages, tile in the page
        scores = _scores(rows[:, :n], layer, where) * factor
        valid = (torch.arange(t * TILE, (t + 1) * TILE).view(TILE, 1, 1, 1) < seen_rows[:n]).expand_as(scores)
        scores = torch.where(valid, scores, -torch.inf)
        high = torch.maximum(m[:n], scores.amax(0))
        some = valid[0]
        alpha = torch.where(some, exp(m[:n] - high), 1.0)
        p = torch.where(valid, exp(scores - high), 0.0)
        total = length[:n] * alpha
        for j in range(TILE):
            total = total + p[j]
        m[:n], length[:n] = high, total
        a = acc[:, :n]
        a.mul_(alpha)
        _add_values(a, p, layer, where)
    if layer.kind == "fp4":
        acc = acc * torch.tensor(layer.global_scale)
    out = acc / torch.where(length > 0, length, 1.0) + 0.0
    return out.view(d, g, layer.n_kv, r, w).permute(1, 4, 2, 3, 0).reshape(g, w, heads, d)


def _scores(rows: Tensor, layer: KvLayer, where: tuple[Tensor, int]) -> Tensor:
    """Dot products of rows [D, n, n_kv, M] with one tile of keys: [16, n, n_kv, M]."""
    keys = _tile(layer.k, where)  # [D or D/8, 16, n, n_kv]
    result = rows.new_zeros((TILE, *rows.shape[1:]))
    product = torch.empty_like(result)
    if layer.k_scales is None:
        keys = keys.float().unsqueeze(-1)
        for d in range(layer.head_dim):
            result.add_(torch.mul(rows[d], keys[d], out=product))
        return result
    keys = _grid_values(keys).flatten(0, 1).unsqueeze(-1)  # [D, 16, n, n_kv, 1]
    scales = decode_e4m3(_tile(layer.k_scales, where)).unsqueeze(-1)
    for block in range(layer.head_dim // 16):
        dot = torch.zeros_like(result)
        for d in range(16 * block, 16 * block + 16):
            dot.add_(torch.mul(rows[d], keys[d], out=product))
        result.add_(dot.mul_(scales[block]))
    return result.mul_(torch.tensor(layer.global_scale))


def _add_values(acc: Tensor, p: Tensor, layer: KvLayer, where: tuple[Tensor, int]) -> None:
    """acc [D, n, n_kv, M] += p_j * v_j for the 16 keys in order; p [16, n, n_kv, M]."""
    values = _tile(layer.v, where)
    if layer.v_scales is None:
        values = values.float().unsqueeze(-1)  # [16, D, n, n_kv, 1]
        for j in range(TILE):
            acc.add_(p[j] * values[j])
        return
    blocks = layer.head_dim // 16
    values = _grid_values(values)  # [D/8, 8, 16 lanes, n, n_kv]
    values = values.view(TILE, blocks, 16, *values.shape[3:]).unsqueeze(-1)
    scales = decode_e4m3(_tile(layer.v_scales, where)).unsqueeze(-1)
    split = acc.view(blocks, 16, *acc.shape[1:])
    p = torch.where(p < 2.0**-80, 0.0, p)
    for j in range(TILE):
        w = head22(p[j] * scales[:, j])
        split.add_(w.unsqueeze(1) * values[j])


def _tile(array: Tensor, where: tuple[Tensor, int]) -> Tensor:
    """One tile of each sequence with the sequences last: [A, B, n, n_kv] of pages [P, n_kv, tiles, A, B]."""
    tile = array.select(2, where[1]).index_select(0, where[0])
    n, n_kv, a, b = tile.shape
    return tile.reshape(n * n_kv, a * b).t().contiguous().view(a, b, n, n_kv)  # a plain 2-D transpose is the fast copy


def _grid_values(words: Tensor) -> Tensor:
    """int32 words [W, 16, ...] to float32 grid values [W, 8, 16, ...]."""
    table = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    out = torch.empty((words.shape[0], 8, *words.shape[1:]))
    for n in range(8):
        out[:, n] = table.index_select(0, ((words >> (4 * n)) & 15).flatten()).view_as(words)
    return out
