"""The check finds what it is there to find: each rule of the protocol, broken on purpose, has a
counterexample.

A mutant is a machine that is right except in one rule. If one of these tests fails, the model has gone
blind, or the rule is not needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from model_explorer import explore
from model_world import (
    EVERY_TICKET_ENDS,
    EVERY_TICKET_ENDS_ONCE,
    NO_PAGE_REUSED_UNDER_A_READER,
    NO_PAGE_REUSED_UNDER_A_WRITER,
    READY_MEANS_RIGHT_BYTES,
    Bounds,
    Model,
)

from tandem_runtime.messenger import decode, prefill

if TYPE_CHECKING:
    from model_world import DecodeStep, PrefillStep

MAX_STATES = 300_000


# --- decode, broken -------------------------------------------------------------------------------


def _released(
    peer: decode.Peer, step: decode.Step, transfer: int, tell: decode.Action | None = None
) -> decode.Step:
    """What `step` would do, and the pages returned on top. `tell`: what the engine hears, if it has to."""
    state, actions = step
    if peer.find(transfer) is None or state.find(transfer) is None:
        return step
    kept = tuple(other for other in state.transfers if other.id != transfer)
    actions = tuple(a for a in actions if not isinstance(a, decode.TellFailed | decode.Expect))
    told = () if tell is None else (tell,)
    return replace(state, transfers=kept), (*actions, *told, decode.Release(transfer))


def releases_on_timeout(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    step = decode.step(peer, event, limits)
    if isinstance(event, decode.TransferTimeout) and peer.link is decode.Link.UP:
        t = peer.find(event.transfer)
        tell = None if t is None or t.told else decode.TellFailed(t.id, "timeout", True)
        return _released(peer, step, event.transfer, tell)
    return step


def releases_on_cancel_ack(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    step = decode.step(peer, event, limits)
    t = peer.find(event.transfer) if isinstance(event, decode.CancelAcked) else None
    if t is not None and t.phase is decode.Phase.CANCELLING:
        return _released(peer, step, t.id)
    return step


def takes_an_undrained_fail_for_drained(
    peer: decode.Peer, event: decode.Event, limits: decode.Limits
) -> decode.Step:
    if isinstance(event, decode.Failed):
        event = replace(event, drained=True)
    return decode.step(peer, event, limits)


def is_ready_when_sent(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    step = decode.step(peer, event, limits)
    if isinstance(event, decode.Sent) and (t := peer.find(event.transfer)) is not None and not t.told:
        return _released(peer, step, t.id, decode.TellReady(t.id))
    return step


def releases_before_the_link_is_closed(
    peer: decode.Peer, event: decode.Event, limits: decode.Limits
) -> decode.Step:
    state, actions = decode.step(peer, event, limits)
    if peer.link is not decode.Link.CLOSING and state.link is decode.Link.CLOSING:
        released = tuple(decode.Release(t.id) for t in state.transfers)
        return replace(state, transfers=()), (*actions, *released)
    return state, actions


def greets_before_the_old_link_is_closed(
    peer: decode.Peer, event: decode.Event, limits: decode.Limits
) -> decode.Step:
    """Says HELLO for the next epoch while it still reads through the last."""
    state, actions = decode.step(peer, event, limits)
    if peer.link is not decode.Link.CLOSING and state.link is decode.Link.CLOSING:
        return state, (*actions, decode.SendHello(state.epoch + 1))
    return state, actions


def releases_on_its_own_cancel(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    step = decode.step(peer, event, limits)
    return _released(peer, step, event.transfer) if isinstance(event, decode.Cancel) else step


def trusts_the_close_of_a_shared_endpoint(
    peer: decode.Peer, event: decode.Event, limits: decode.Limits
) -> decode.Step:
    return decode.step(peer, event, replace(limits, close_is_fence=True))


def never_gives_up_a_cancel(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    if isinstance(event, decode.TransferTimeout | decode.LinkTimeout) and peer.link is decode.Link.UP:
        return peer, ()
    return decode.step(peer, event, limits)


def tells_the_engine_twice(peer: decode.Peer, event: decode.Event, limits: decode.Limits) -> decode.Step:
    state, actions = decode.step(peer, event, limits)
    if isinstance(event, decode.Failed) and (t := peer.find(event.transfer)) is not None and t.told:
        return state, (*actions, decode.TellFailed(t.id, "again", True))
    return state, actions


# --- prefill, broken ------------------------------------------------------------------------------


def forgets_a_tombstone(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    state, actions = prefill.step(peer, event, fences)
    kept = tuple(t for t in state.transfers if t.phase is not prefill.Phase.TOMBSTONE)
    return replace(state, transfers=kept), actions


def forgets_a_refusal(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    state, actions = prefill.step(peer, event, fences)
    kept = tuple(t for t in state.transfers if t.phase is not prefill.Phase.REFUSED)
    return replace(state, transfers=kept), actions


def forgets_what_is_done(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    state, actions = prefill.step(peer, event, fences)
    kept = tuple(t for t in state.transfers if t.phase is not prefill.Phase.DONE)
    return replace(state, transfers=kept), actions


def does_not_deduplicate(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    if isinstance(event, prefill.Dispatched) and event.refusal is None and peer.link is prefill.Link.UP:
        if sum(t.phase in prefill.HOLDING for t in peer.transfers) < 2:  # enough to see it
            t = prefill.Transfer(event.session, event.seq, event.transfer, event.key, prefill.Phase.QUEUED)
            if event.session == peer.session:
                return replace(peer, transfers=(*peer.transfers, t)), (
                    prefill.Begin(t.key),
                    prefill.SendAccept(t.seq, t.id, t.key),
                )
        return peer, ()
    return prefill.step(peer, event, fences)


def acknowledges_without_stopping(
    peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences
) -> prefill.Step:
    state, actions = prefill.step(peer, event, fences)
    if isinstance(event, prefill.Cancelled):
        t = peer.record(event.seq)
        if t is not None and t.phase in (prefill.Phase.QUEUED, prefill.Phase.SENDING):
            return peer, (prefill.SendCancelAck(t.seq, t.id, 0, False),)
    return state, actions


def calls_what_it_holds_unknown(
    peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences
) -> prefill.Step:
    if isinstance(event, prefill.Cancelled) and peer.link is prefill.Link.UP:
        return peer, (prefill.SendCancelAck(event.seq, event.transfer, 0, True),)
    return prefill.step(peer, event, fences)


def releases_when_posted(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    """Takes the end of posting for the end of reading."""
    state, actions = prefill.step(peer, event, fences)
    stopped = tuple(prefill.Release(a.key) for a in actions if isinstance(a, prefill.Stop))
    actions = tuple(a for a in actions if not (isinstance(a, prefill.Release)))
    return state, (*actions, *stopped)


def trusts_its_own_close(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    """On shm: as if the closing of our endpoint ended the reading of our memory."""
    return prefill.step(peer, event, replace(fences, close=True))


def takes_the_same_epoch_for_a_later_one(
    peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences
) -> prefill.Step:
    """Skips the epoch check: a HELLO again of the epoch whose link prefill has closed passes for a proof
    that decode closed it.
    """
    state, actions = prefill.step(peer, event, fences)
    if isinstance(event, prefill.Hello) and event.session == peer.session:
        freed = tuple(t for t in state.transfers if t.phase is prefill.Phase.UNFENCED)
        kept = tuple(t for t in state.transfers if t not in freed)
        return replace(state, transfers=kept), (*actions, *(prefill.Release(t.key) for t in freed))
    return state, actions


def keeps_the_old_transfers(peer: prefill.Peer, event: prefill.Event, fences: prefill.Fences) -> prefill.Step:
    """A new epoch, and the source pages of the last are never asked after."""
    state, actions = prefill.step(peer, event, fences)
    if isinstance(event, prefill.Drained) and event.link_closed:
        return peer, ()
    return state, actions


NET = Bounds(losses=False, refusals=False, engine_failures=False)
FAILING = Bounds(losses=False, refusals=False)
REFUSING = Bounds(losses=False, engine_failures=False)
SHM = Bounds(losses=False, refusals=False, engine_failures=False, shm=True, memories=2)

EFA = Bounds(losses=False, refusals=False, engine_failures=False, one_endpoint=True)

DECODE_MUTANTS: list[tuple[DecodeStep, Bounds, str]] = [
    (releases_on_timeout, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (releases_on_cancel_ack, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (takes_an_undrained_fail_for_drained, FAILING, NO_PAGE_REUSED_UNDER_A_WRITER),
    (is_ready_when_sent, NET, READY_MEANS_RIGHT_BYTES),
    (releases_before_the_link_is_closed, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (releases_on_its_own_cancel, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (greets_before_the_old_link_is_closed, SHM, NO_PAGE_REUSED_UNDER_A_READER),
    (trusts_the_close_of_a_shared_endpoint, EFA, NO_PAGE_REUSED_UNDER_A_WRITER),
    (never_gives_up_a_cancel, Bounds(), EVERY_TICKET_ENDS),
    (tells_the_engine_twice, FAILING, EVERY_TICKET_ENDS_ONCE),
]
PREFILL_MUTANTS: list[tuple[PrefillStep, Bounds, str]] = [
    (forgets_a_tombstone, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (forgets_a_refusal, REFUSING, NO_PAGE_REUSED_UNDER_A_WRITER),
    (forgets_what_is_done, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (does_not_deduplicate, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (acknowledges_without_stopping, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (calls_what_it_holds_unknown, NET, NO_PAGE_REUSED_UNDER_A_WRITER),
    (releases_when_posted, NET, NO_PAGE_REUSED_UNDER_A_READER),
    (trusts_its_own_close, EFA, NO_PAGE_REUSED_UNDER_A_READER),
    (trusts_its_own_close, SHM, NO_PAGE_REUSED_UNDER_A_READER),
    (takes_the_same_epoch_for_a_later_one, SHM, NO_PAGE_REUSED_UNDER_A_READER),
    (keeps_the_old_transfers, NET, EVERY_TICKET_ENDS),
]


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("mutant", "bounds", "broken"), DECODE_MUTANTS, ids=_name)
def test_a_broken_decode_is_found_out(mutant: DecodeStep, bounds: Bounds, broken: str) -> None:
    finding = explore(Model(bounds, decode_step=mutant), MAX_STATES)
    print(finding)
    assert finding.broken == broken


@pytest.mark.parametrize(("mutant", "bounds", "broken"), PREFILL_MUTANTS, ids=_name)
def test_a_broken_prefill_is_found_out(mutant: PrefillStep, bounds: Bounds, broken: str) -> None:
    finding = explore(Model(bounds, prefill_step=mutant), MAX_STATES)
    print(finding)
    assert finding.broken == broken
