"""Sparse attention from its definition: explicit loops in float64 that share no code with what they check.

A page's landmark is the mean of its keys; its score for a query is the mean of the group's queries, dot the landmark.
A query keeps the first `sink` pages, the last `recent` ones (the one being filled included) and, of the others, the
`budget` with the best scores, the earlier of equals.
"""

import math

import numpy as np


def choose_pages(queries, keys, position, budget, *, page_size, sink, recent):
    """The pages that the query at `position` keeps, as a set.

    queries: (group, head_dim) of the query heads that share a KV head; keys: (num_tokens, head_dim) of that KV head.
    """
    num_pages = position // page_size + 1
    kept = {page for page in range(num_pages) if page < sink or page >= num_pages - recent}
    mean_query = sum(np.float64(query) for query in queries) / len(queries)
    scores = {}
    for page in set(range(num_pages)) - kept:
        tokens = range(page * page_size, (page + 1) * page_size)
        landmark = sum(np.float64(keys[token]) for token in tokens) / page_size
        scores[page] = sum(float(a) * float(b) for a, b in zip(mean_query, landmark, strict=True))
    best = sorted(scores, key=lambda page: (-scores[page], page))
    return kept | set(best[:budget])


def visible_tokens(position, pages=None, *, page_size=1, window=None):
    """Tokens that the query at `position` sees: not later ones, those of `pages`, the last `window`."""
    return [
        token
        for token in range(position + 1)
        if (pages is None or token // page_size in pages) and (window is None or token > position - window)
    ]


def attend(query, keys, values, tokens, *, scaling, softcap=None):
    """Softmax attention of one query head, `(head_dim,)`, over `tokens`."""
    scores = []
    for token in tokens:
        score = sum(float(a) * float(b) for a, b in zip(query, keys[token], strict=True)) * scaling
        scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    out = np.zeros(len(values[0]))
    for weight, token in zip(weights, tokens, strict=True):
        out += weight / total * np.float64(values[token])
    return out


def decode(query, keys, values, position, budget, *, page_size, sink, recent, scaling, window=None, softcap=None):
    """All heads of one query, `(num_heads, head_dim)`, over `(num_tokens, num_kv_heads, head_dim)`. No budget: dense."""
    num_heads, num_kv_heads = len(query), keys.shape[1]
    group = num_heads // num_kv_heads
    rows = []
    for head in range(num_kv_heads):
        queries = query[head * group : (head + 1) * group]
        pages = None
        if budget is not None:
            pages = choose_pages(
                queries, keys[:, head], position, budget, page_size=page_size, sink=sink, recent=recent
            )
        tokens = visible_tokens(position, pages, page_size=page_size, window=window)
        rows += [attend(q, keys[:, head], values[:, head], tokens, scaling=scaling, softcap=softcap) for q in queries]
    return np.stack(rows)


def whole_sequence(query, keys, values, prompt_length, budgets, **options):
    """Every token of a sequence, `(num_tokens, num_heads, head_dim)`: the prompt's densely, the others by budget."""
    return np.stack(
        [
            decode(
                query[t], keys, values, t, None if budgets is None or t < prompt_length else int(budgets[t]), **options
            )
            for t in range(len(query))
        ]
    )
