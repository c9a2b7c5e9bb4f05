"""Whether a checkpoint is one that the ledger recorded: a manifest's seal has no key, and the ledger's records are signed."""

from bisect import bisect_right

from privacy.ledger.records import LedgerState


def not_recorded_because(state: LedgerState, step: int, digest: str, line: int) -> str | None:
    """Why a checkpoint is not one that the run wrote, as far as its ledger knows; None where nothing speaks against it.

    A crash may come between a checkpoint and its record. Then it is of the last step that its session had done at the line that
    it remembers, and that session recorded no checkpoint after that line, and none of its step or a later one.

    Args:
        digest: SHA-256 of its manifest, in hex.
        line: what it remembers of the ledger, from 0; a line that the ledger has.
    """
    if not state.plan.enabled:  # then the ledger records no checkpoints
        return None
    if any((known, stated) == (step, digest) for _, known, stated in state.checkpoint_lines):
        return None
    starts = state.session_lines
    number = bisect_right(starts, line)
    first = starts[number - 1] if number else 0
    end = starts[number] if number < len(starts) else state.num_lines
    done = [known for at, known in state.done_lines if first <= at <= line]
    fits = step == done[-1] if done else step <= state.last_done_step
    others = [(at, known) for at, known, _ in state.checkpoint_lines if first <= at < end]
    ended = state.closed is not None and end == state.num_lines  # by that very session, which waits for its checkpoints
    if not fits or ended or any(at > line or known >= step for at, known in others):
        return "its manifest.json is not the one that the ledger recorded"
    return None
