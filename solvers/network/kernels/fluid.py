"""The loops of the fluid engine: the events of jobs that can contend, and their sending speeds.

A job that sends at speed x takes ``share * x`` of a link, where ``share`` = busy_s / (comm_s -
delay_s) is at most 1.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily
from tessera.solvers.network.kernels.groups import Uses

WAITING, SENDING, DONE = 0, 1, 2
"""The state of a job's communication.

WAITING: it has not begun, or its delay runs. SENDING: data moves. DONE: it is over."""

MAX_CACHED_BITS = 12
"""The speeds of up to 2^12 sets of senders are kept while a group is played."""

MOST_NAMED = 62
"""Sets of senders among at most this many jobs have a number; sets of more jobs are not kept."""

ROUNDING = 1e-12
"""A share of a link that is no larger than this counts as 0."""

Times: TypeAlias = tuple[Floats, Floats, Floats, Floats]
"""compute_s, start_s, delay_s and seconds of sending at full speed, (jobs,) each."""

Users: TypeAlias = tuple[Ints, Ints]
"""user_start (links of the group + 1,) and the places of each link's users."""

Scratch: TypeAlias = tuple[Floats, Floats, Floats, Floats, Ints]
"""Work arrays of the links of a group.

They are: the room left; the room left beyond what a level's stopped senders use; the weight of the
rising senders (0 between calls); the height at which these fill the link; and a list of links."""

Groups: TypeAlias = tuple[Ints, Ints, Ints]
"""group_start (groups + 1,), member (jobs,) and first_link (groups + 1,): the jobs and links of
each group."""

CountWindow: TypeAlias = tuple[float, float, float]
"""The beginning and end of counting, and the largest distance of events at one moment; seconds."""

Noise: TypeAlias = tuple[float, int]
"""The standard deviation of the logarithm of the compute factor, and the seed."""


@compile_lazily
def add_rates(
    times: Times,
    uses: Uses,
    groups: Groups,
    level: Ints,
    begin_s: Floats,
    window: CountWindow,
    noise: Noise,
    iterations: Floats,
    comm: Floats,
) -> int:
    """Add the computation and communication of each job in the window.

    The units are iterations, and seconds at full speed. Return the number of events.
    """
    group_start, member, first_link = groups
    events = 0
    for g in range(len(group_start) - 1):
        first, end = group_start[g], group_start[g + 1]
        if end - first == 1 and noise[0] == 0.0:
            play_alone(times, member[first], begin_s[member[first]], window, iterations, comm)
        else:
            ordered = by_level(member[first:end], level)
            events += play_events(
                times,
                uses,
                ordered,
                level,
                first_link[g],
                first_link[g + 1],
                begin_s,
                window,
                noise,
                iterations,
                comm,
            )
    return events


@compile_lazily
def play_rows(
    times: Times,
    uses: Uses,
    groups: Groups,
    group: int,
    levels: Ints,
    work_flop: Floats,
    window: CountWindow,
    work: Floats,
) -> int:
    """Fill ``work`` with the flop of a group in the window under each row of ``levels``.

    ``levels`` is (rows, jobs). Return the number of events.
    """
    group_start, member, first_link = groups
    jobs = member[group_start[group] : group_start[group + 1]]
    count, events, none = len(work_flop), 0, (0.0, 0)
    begin_s, iterations, comm = np.zeros(count), np.zeros(count), np.zeros(count)
    for r in range(len(levels)):
        for j in jobs:
            iterations[j] = 0.0
        if len(jobs) == 1:
            play_alone(times, jobs[0], 0.0, window, iterations, comm)
        else:
            ordered = by_level(jobs, levels[r])
            events += play_events(
                times,
                uses,
                ordered,
                levels[r],
                first_link[group],
                first_link[group + 1],
                begin_s,
                window,
                none,
                iterations,
                comm,
            )
        work[r] = 0.0
        for j in jobs:
            work[r] += work_flop[j] * iterations[j]
    return events


@compile_lazily
def by_level(jobs: Ints, level: Ints) -> Ints:
    """Return the jobs, the highest level first; jobs of one level keep their order."""
    out = jobs.copy()
    for i in range(1, len(out)):
        job, at = out[i], i
        while at > 0 and level[out[at - 1]] < level[job]:
            out[at] = out[at - 1]
            at -= 1
        out[at] = job
    return out


@compile_lazily
def play_alone(
    times: Times, job: int, begin_s: float, window: CountWindow, iterations: Floats, comm: Floats
) -> None:
    """Add the work in the window of a job that contends with no other."""
    compute_s, start_s = times[0][job], times[1][job]
    comm_s = times[2][job] + times[3][job]
    period_s = max(compute_s, start_s + comm_s) if comm_s > 0.0 else compute_s
    for sign, at_s in ((-1.0, window[0]), (1.0, window[1])):
        since_s = max(0.0, at_s - begin_s)
        whole = math.floor(since_s / period_s)
        part_s = since_s - whole * period_s
        iterations[job] += sign * (whole + min(max(part_s / compute_s, 0.0), 1.0))
        comm[job] += sign * (whole * comm_s + min(max(part_s - start_s, 0.0), comm_s))


@compile_lazily
def overlap_s(from_s: float, to_s: float, window: CountWindow) -> float:
    """Return the part of the time from ``from_s`` to ``to_s`` that lies in the window."""
    return max(0.0, min(to_s, window[1]) - max(from_s, window[0]))


@compile_lazily
def compute_factor(noise: Noise, job: int, iteration: int) -> float:
    """Return the factor of compute: log-normal with mean 1.

    The factors of a seed are the same whatever else happens.
    """
    if noise[0] == 0.0:
        return 1.0
    state = np.uint64(noise[1]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(job)
    state = mix_bits(state) + np.uint64(iteration)
    first, second = mix_bits(state), mix_bits(state ^ np.uint64(0xD1B54A32D192ED03))
    radius = math.sqrt(-2.0 * math.log((np.float64(first >> np.uint64(11)) + 1.0) / 2.0**53))
    angle = 2.0 * math.pi * np.float64(second >> np.uint64(11)) / 2.0**53
    return math.exp(noise[0] * radius * math.cos(angle) - noise[0] ** 2 / 2.0)


@compile_lazily
def mix_bits(state: np.uint64) -> np.uint64:
    """Return the number with its bits scattered (the finalizer of splitmix64)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@compile_lazily
def play_events(
    times: Times,
    uses: Uses,
    who: Ints,
    level: Ints,
    first_link: int,
    end_link: int,
    begin_s: Floats,
    window: CountWindow,
    noise: Noise,
    iterations: Floats,
    comm: Floats,
) -> int:
    """Play the events of jobs that can contend until the window ends; return the number of events.

    ``who`` has the jobs, the highest level first. A job's next event is the one that its
    communication waits for: it may begin to send (``WAITING``), has sent all (``SENDING``), or
    computation ends and with it the iteration (``DONE``). Between events speeds are constant, and
    follow from the set of senders. The remaining data of a job is updated when its speed changes.
    """
    compute_s, start_s, delay_s, send_s = times
    n, events, iteration = len(who), 0, np.zeros(len(who), np.int64)
    state, stretch = np.zeros(n, np.int64), np.ones(n)
    began, event, since = np.empty(n), np.empty(n), np.zeros(n)
    left, speed = np.zeros(n), np.zeros(n)
    users, links = users_of_links(uses, who, first_link, end_link), end_link - first_link
    room, spare, weight, fills = np.empty(links), np.empty(links), np.zeros(links), np.empty(links)
    scratch = room, spare, weight, fills, np.empty(links, np.int64)
    slots = 1 << min(n, MAX_CACHED_BITS) if n <= MOST_NAMED else 1
    known, kept = np.full(slots, -1, np.int64), np.empty((slots, n))
    senders = 0  # bit i: place i sends
    for i in range(n):
        j = who[i]
        stretch[i] = compute_factor(noise, j, 0)
        began[i] = begin_s[j]
        event[i] = began[i] + start_s[j] * stretch[i] + delay_s[j]
    # Go from event to event.
    while True:
        now = np.inf
        for i in range(n):
            now = min(now, event[i])
        if now >= window[1]:
            break
        limit, top = now + window[2], n
        for i in range(n):
            if event[i] > limit:
                continue
            events += 1
            j, at = who[i], event[i]
            # The job has sent all of its data.
            if state[i] == SENDING:
                comm[j] += speed[i] * overlap_s(since[i], at, window)
                state[i], speed[i], top = DONE, 0.0, min(top, i)
                senders ^= 1 << i if n <= MOST_NAMED else 0
                event[i] = began[i] + compute_s[j] * stretch[i]
            # The iteration ends, and the next one begins.
            if state[i] == DONE and event[i] <= limit:
                ended = began[i] + compute_s[j] * stretch[i]
                spent = overlap_s(began[i], ended, window)
                iterations[j] += spent / (compute_s[j] * stretch[i])
                iteration[i] += 1
                stretch[i] = compute_factor(noise, j, iteration[i])
                state[i], began[i] = WAITING, max(at, ended)
                event[i] = began[i] + start_s[j] * stretch[i] + delay_s[j]
            # The delay is over, and the job begins to send.
            if state[i] == WAITING and event[i] <= limit:
                comm[j] += overlap_s(event[i] - delay_s[j], event[i], window)
                if send_s[j] > 0.0:
                    state[i], left[i], since[i] = SENDING, send_s[j], event[i]
                    event[i], top = np.inf, min(top, i)
                    senders ^= 1 << i if n <= MOST_NAMED else 0
                else:
                    state[i], event[i] = DONE, began[i] + compute_s[j] * stretch[i]
        # If the set of senders changed, look up or compute the new speeds, and apply them.
        if top < n:
            at = 0
            if n <= MOST_NAMED:
                at = senders if n <= MAX_CACHED_BITS else scatter_bits(senders) & (slots - 1)
                top = 0
            if n > MOST_NAMED or known[at] != senders:
                known[at] = senders
                share_out(uses, users, who, level, first_link, top, state, speed, kept[at], scratch)
            fresh = kept[at]
            for i in range(n):
                if state[i] == SENDING and (fresh[i] != speed[i] or event[i] == np.inf):
                    j, from_s = who[i], since[i]
                    comm[j] += speed[i] * overlap_s(from_s, now, window)
                    left[i] = max(0.0, left[i] - speed[i] * max(0.0, now - from_s))
                    since[i], speed[i] = max(now, from_s), fresh[i]
                    event[i] = np.inf
                    if speed[i] > 0.0:
                        event[i] = since[i] + left[i] / speed[i]
    # Count the parts of iterations and communication until the window ends.
    for i in range(n):
        j, ended = who[i], began[i] + compute_s[who[i]] * stretch[i]
        iterations[j] += overlap_s(began[i], ended, window) / (compute_s[j] * stretch[i])
        if state[i] == SENDING:
            comm[j] += speed[i] * overlap_s(since[i], window[1], window)
        elif state[i] == WAITING:
            comm[j] += overlap_s(event[i] - delay_s[j], event[i], window)
    return events


@compile_lazily
def scatter_bits(senders: int) -> int:
    """Return the number with its bits mixed, at least 0."""
    return int(mix_bits(np.uint64(senders)) >> np.uint64(1))


@compile_lazily
def users_of_links(uses: Uses, who: Ints, first_link: int, end_link: int) -> Users:
    """Return the places that use each of the group's links."""
    use_start, link, _ = uses
    user_start = np.zeros(end_link - first_link + 1, np.int64)
    for j in who:
        for u in range(use_start[j], use_start[j + 1]):
            user_start[link[u] - first_link + 1] += 1
    for e in range(end_link - first_link):
        user_start[e + 1] += user_start[e]
    at, user = user_start[:-1].copy(), np.empty(user_start[-1], np.int64)
    for i in range(len(who)):
        for u in range(use_start[who[i]], use_start[who[i] + 1]):
            e = link[u] - first_link
            user[at[e]] = i
            at[e] += 1
    return user_start, user


@compile_lazily
def share_out(
    uses: Uses,
    users: Users,
    who: Ints,
    level: Ints,
    first_link: int,
    top: int,
    state: Ints,
    speed: Floats,
    fresh: Floats,
    scratch: Scratch,
) -> None:
    """Fill ``fresh`` with the speeds of the senders; places above the level of ``top`` keep theirs.

    Level by level, the speeds rise together until a link fills, which is max-min fair.
    """
    use_start, link, share = uses
    room, n = scratch[0], len(who)
    while top > 0 and level[who[top - 1]] == level[who[top]]:
        top -= 1
    room[:] = 1.0
    for i in range(top):
        fresh[i] = speed[i]
        take_load(uses, who[i], first_link, state[i], speed[i], room)
    first = top
    # Share out the links level by level, the highest first.
    while first < n:
        end, senders, last = first, 0, first
        while end < n and level[who[end]] == level[who[first]]:
            if state[end] == SENDING:
                senders, last = senders + 1, end
            end += 1
        if senders == 1:
            free = 1.0
            for u in range(use_start[who[last]], use_start[who[last] + 1]):
                free = min(free, room[link[u] - first_link] / share[u])
            fresh[last] = free if free > ROUNDING else 0.0
        elif senders > 1:
            fill_links(uses, users, who, first_link, first, end, state, fresh, scratch)
        if end < n:
            for i in range(first, end):
                take_load(uses, who[i], first_link, state[i], fresh[i], room)
        first = end


@compile_lazily
def take_load(
    uses: Uses, job: int, first_link: int, state: int, speed: float, room: Floats
) -> None:
    """Take from ``room`` the load of the job at ``speed``, if it sends."""
    use_start, link, share = uses
    if state == SENDING:
        for u in range(use_start[job], use_start[job + 1]):
            room[link[u] - first_link] -= share[u] * speed


@compile_lazily
def fill_links(
    uses: Uses,
    users: Users,
    who: Ints,
    first_link: int,
    first: int,
    end: int,
    state: Ints,
    fresh: Floats,
    scratch: Scratch,
) -> None:
    """Raise the speeds of a level's senders together; senders on a full link stop rising.

    The level has the places ``first`` to ``end``. Only links that all of its senders together could
    fill are considered.
    """
    use_start, link, share = uses
    room, spare, weight, fills, seen = scratch
    # Add up the weights of the rising senders on each link.
    rising, count, height = 0, 0, 0.0
    for i in range(first, end):
        fresh[i] = 0.0
        if state[i] == SENDING:
            fresh[i] = -1.0  # it rises
            rising += 1
            for u in range(use_start[who[i]], use_start[who[i] + 1]):
                e = link[u] - first_link
                if weight[e] == 0.0:
                    seen[count] = e
                    count += 1
                weight[e] += share[u]
    # Keep the links that the rising senders could fill.
    tight = 0
    for k in range(count):
        e = seen[k]
        if weight[e] > room[e]:
            seen[tight], spare[e] = e, max(0.0, room[e])
            fills[e] = spare[e] / weight[e]
            tight += 1
        else:
            weight[e] = 0.0
    # Raise the speeds until the next link fills, and stop its senders.
    while rising > 0:
        lowest, left = 1.0, 0
        for k in range(tight):
            e = seen[k]
            if weight[e] > ROUNDING:
                seen[left] = e
                left += 1
                lowest = min(lowest, fills[e])
            else:
                weight[e] = 0.0
        tight, height = left, max(height, lowest)
        if height >= 1.0 - ROUNDING:
            for i in range(first, end):
                if fresh[i] < 0.0:
                    fresh[i] = 1.0
            break
        for k in range(tight):
            if weight[seen[k]] > ROUNDING and fills[seen[k]] <= height + ROUNDING:
                at = users[0][seen[k]], users[0][seen[k] + 1]
                rising -= stop_senders(
                    uses,
                    users[1][at[0] : at[1]],
                    who,
                    first_link,
                    height,
                    first,
                    end,
                    fresh,
                    scratch,
                )
                # No sender rises there any more. A rounding rest would hold back all others.
                weight[seen[k]] = 0.0
    for k in range(tight):
        weight[seen[k]] = 0.0


@compile_lazily
def stop_senders(
    uses: Uses,
    on_link: Ints,
    who: Ints,
    first_link: int,
    height: float,
    first: int,
    end: int,
    fresh: Floats,
    scratch: Scratch,
) -> int:
    """Stop the rising places of ``on_link`` at ``height``, and return their number."""
    use_start, link, share = uses
    _, spare, weight, fills, _ = scratch
    stopped = 0
    for i in on_link:
        if first <= i < end and fresh[i] < 0.0:
            fresh[i] = height if height > ROUNDING else 0.0
            stopped += 1
            for u in range(use_start[who[i]], use_start[who[i] + 1]):
                e = link[u] - first_link
                if weight[e] > 0.0:
                    weight[e] = max(0.0, weight[e] - share[u])
                    spare[e] = max(0.0, spare[e] - share[u] * fresh[i])
                    if weight[e] > ROUNDING:
                        fills[e] = spare[e] / weight[e]
    return stopped
