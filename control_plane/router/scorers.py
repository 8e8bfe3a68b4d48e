"""Second verb of routing: how good a worker is for a request. Lower is better, 0 is idle.

A scorer is a pure function from a snapshot and a need to a number. What a worker reports and what
this gateway's books say overlap; the larger one counts, since each alone can miss something: the
report is old, and the books know nothing of other gateways.
"""

from __future__ import annotations

from control_plane.router.snapshot import Need, WorkerSnapshot


def queued_prefill(snapshot: WorkerSnapshot, need: Need) -> float:
    """Prompt tokens ahead of the answer's first token, this prompt included, plus what finished
    prompts that nobody has read yet keep from being computed. In tokens."""
    load, worker = snapshot.load, snapshot.worker
    queued = max(load.queued_prompt_tokens, snapshot.books.prompt_tokens)
    unread = load.unread_blocks * worker.block_tokens
    return queued + need.prompt_tokens + unread - cache_credit(snapshot)


def cache_credit(snapshot: WorkerSnapshot) -> float:
    """Tokens of this prompt that need not be computed, less with every prompt ahead of it: a
    beginning that many requests share would draw all of them to the worker that had it first, and
    the others would never learn it."""
    ahead = max(snapshot.books.prompts, snapshot.load.waiting_requests)
    return snapshot.cached_tokens / (1 + ahead)


def filled_decode(snapshot: WorkerSnapshot, need: Need) -> float:
    """Share of the worker's blocks in use once this request is there, plus 1 for every request
    that waits already. Above 1 the request would wait."""
    load, worker, books = snapshot.load, snapshot.worker, snapshot.books
    num_blocks = max(worker.num_blocks, 1)
    reported = load.num_blocks - load.free_blocks
    used = max(reported, books.blocks) + need.all_blocks(worker.block_tokens)
    busy = max(load.running_requests, books.requests) / num_blocks
    return used / num_blocks + busy + load.waiting_requests


def whole(snapshot: WorkerSnapshot, need: Need) -> float:
    """Of a worker that reads the prompt, too: its blocks, and the prompts ahead of this one, in
    prompts of this length."""
    ahead = queued_prefill(snapshot, need) / max(need.prompt_tokens, 1)
    return filled_decode(snapshot, need) + ahead
