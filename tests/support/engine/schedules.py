"""Schedulers with graphs of known cost, and sequences for them."""

from __future__ import annotations

from nxd_server.engine.request import Sequence, Ticket
from nxd_server.engine.sampling_params import Sampler, SamplingParams
from nxd_server.engine.scheduler import Scheduler
from nxd_server.engine.step_runner import Graph, StepCosts


def scheduler(slots=4, batches=(1, 2, 4), lengths=(8, 16), seconds=None, ratio=4.0, mixes=False, groups=1, **more):
    all_graphs = [Graph(f"decode_b{b}", b, 1) for b in batches] + [Graph(f"prefill_s{s}", 1, s) for s in lengths]
    costs = StepCosts(all_graphs)
    for graph in all_graphs:
        costs.set(graph.name, (seconds or {}).get(graph.name, 0.001 * graph.batch**0.5 * graph.length**0.8))
    return Scheduler(all_graphs, slots, costs, prefill_ratio=ratio, mixes=mixes, groups=groups, **more)


def sequence(identity, prompt=4, new=4, params=None, sampler=None, **more):
    """``prompt``: its tokens, or their number."""
    return Sequence(
        id=identity,
        ticket=Ticket("request", lambda event: None, None, lambda ticket: None),
        index=0,
        prompt=list(range(prompt)) if isinstance(prompt, int) else prompt,
        params=params or SamplingParams(),
        max_new_tokens=new,
        sampler=sampler or Sampler({}, (), ()),
        **more,
    )


def steps(subject, count=20):
    """Run so many steps, each at its known cost; 20 pay for the piece of a prompt that came before."""
    taken = []
    for _ in range(count):
        taken.append(subject.next_step())
        subject.begin(taken[-1])
    return taken


def arrive(subject, *items):
    for item in items:
        subject.add(item)
    subject.admit()


def decoding(subject, count):
    """``count`` choices that have had their first token."""
    items = [sequence(identity, 4, 100) for identity in range(count)]
    arrive(subject, *items)
    while any(item.remaining for item in items):
        steps(subject, 1)
    return items
