"""Causal attention over paged keys and values, with an online softmax over strips of 64 keys (definition of the bits).

Per query, head and strip of 64 keys by absolute position (arXiv 1805.02867, 2205.14135 for the online softmax):

    s_j = (q . k_j) * scale        summed over d in order, float32, multiply then add
    m' = max(m, max_j s_j);  alpha = exp(m - m');  p_j = exp(s_j - m')
    l_i = l_i * alpha + (((p_i + p_16+i) + p_32+i) + p_48+i)      sixteen sums, i = 0 .. 15
    acc = acc * alpha + (0 + p_0 * v_0 + p_1 * v_1 + ..)           in order; short sums keep long contexts exact to 1e-6
    out = acc / l + 0              l: the l_i in halves, i beside i + 8, 4, 2, 1; the last addition turns -0 into +0

Masked keys take part in nothing. FP4 pages have their own order, in :mod:`halfbyte.kernels.reference.attention_fp4`.

The reference is vectorised over sequences, heads and queries, which are the last dimensions of every tensor below, and
loops over keys and dimensions; so its value cannot depend on what shares the batch or on the page size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.kernels.kv import TILE, KvLayer
from halfbyte.kernels.reference.attention_fp4 import Fp4Query, add_fp4_values, fp4_scores
from halfbyte.kernels.reference.elementary import exp, exp_negative
from halfbyte.kernels.reference.tiles import STRIP, Tiles, read_tiles

__all__ = ["attention", "check_attention"]

_CHUNK = 64  # queries of one sequence that share a pass over the keys
_ROWS = 8192  # (sequence, head, query) rows processed together


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
    query = Fp4Query.of(rows, layer.global_scale, scale) if layer.kind == "fp4" else None
    seen_rows = seen.unsqueeze(1).expand(g, r, w).reshape(g, 1, r * w)
    last = seen.amax(1)
    m = torch.full(rows.shape[1:], -torch.inf)
    lanes = torch.zeros(TILE, *m.shape)
    acc = torch.zeros_like(rows)
    for first in range(0, int(last.max()), STRIP):
        n = int((last > first).sum())
        tiles = Tiles.at(layer, pages[:n], first, int(last.max()))
        if query is None:
            scores = _scores(rows[:, :n], layer, tiles) * torch.tensor(scale, dtype=torch.float32)
        else:
            scores = fp4_scores(query.first(n), layer, tiles)
        seen_here = (seen_rows[:n] - first).expand(scores.shape[1:])
        valid = torch.arange(len(scores)).view(-1, 1, 1, 1) < seen_here
        scores = torch.where(valid, scores, -torch.inf)
        top, some = scores.amax(0), seen_here > 0
        high = torch.maximum(m[:n], top)
        alpha = torch.where(some, exp(m[:n] - high), 1.0)
        p = exp(scores - high) if query is None else exp_negative(scores - top)
        p = torch.where(valid, p, 0.0)
        parts = p.view(-1, TILE, *p.shape[1:])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        a = acc[:, :n]
        a.mul_(alpha)
        if query is None:
            lanes[:, :n] = lanes[:, :n] * alpha + total
            _add_values(a, p, layer, tiles)
        else:
            gain = torch.where(some, exp(top - high), 0.0)
            lanes[:, :n] = lanes[:, :n] * alpha + total * gain
            add_fp4_values(a, p, gain, seen_here, layer, tiles)
        m[:n] = high
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    length = torch.where(seen_rows > 0, lanes[0], 1.0)
    if query is None:
        out = acc / length + 0.0
    else:
        out = acc * torch.tensor(layer.global_scale) / length + 0.0
        out = torch.where(torch.isnan(query.factor), torch.nan, out)
    return out.view(d, g, layer.n_kv, r, w).permute(1, 4, 2, 3, 0).reshape(g, w, heads, d)


def _scores(rows: Tensor, layer: KvLayer, tiles: Tiles) -> Tensor:
    """Dot products of rows [D, n, n_kv, M] with the keys of a strip: [keys, n, n_kv, M]."""
    keys = torch.cat(read_tiles(layer.k, tiles), 1).float().unsqueeze(-1)  # [D, keys, n, n_kv, 1]
    result = rows.new_zeros((keys.shape[1], *rows.shape[1:]))
    product = torch.empty_like(result)
    for d in range(layer.head_dim):
        result.add_(torch.mul(rows[d], keys[d], out=product))
    return result


def _add_values(acc: Tensor, p: Tensor, layer: KvLayer, tiles: Tiles) -> None:
    """acc [D, n, n_kv, M] += the sum of p_j * v_j over the keys of a strip in order; p [keys, n, n_kv, M]."""
    values = torch.cat(read_tiles(layer.v, tiles)).float().unsqueeze(-1)  # [keys, D, n, n_kv, 1]
    total = torch.zeros_like(acc)
    for j in range(len(values)):
        total.add_(p[j] * values[j])
    acc.add_(total)
