"""Concurrent users that submit, cancel and schedule, repeat unanswered calls, and record answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import grpc
import numpy as np
from numpy.random import Generator

from tessera.v1 import jobs_pb2, scheduler_pb2
from tests.support.system import Lab, User, a_job_message, until, uuid

LIVE_JOBS = 12
"""The number of uncancelled jobs above which the canceller works."""

PAUSE_S = 0.02
"""The pause between two calls of one user."""


class Load:
    """Four threads of calls. They keep the acknowledged submissions, cancellations and rounds."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab, self._seed = lab, seed
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._threads = [
            threading.Thread(target=self._repeat, args=(number, work))
            for number, work in enumerate(
                (self._submit, self._cancel, self._schedule, self._schedule)
            )
        ]
        self.user = User(lab.stack)
        self.first = 0  # the replica that each call tries first
        self.begun = 0  # calls, each counted once even if it is repeated
        self.submitted: dict[str, str] = {}  # label -> name
        self.cancelled: set[str] = set()
        self.rounds: dict[str, str] = {}  # request id -> name
        self.errors: list[grpc.RpcError | AssertionError] = []

    @property
    def acknowledged(self) -> int:
        """Return the number of answered calls."""
        return len(self.submitted) // 2 + len(self.cancelled) + len(self.rounds)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until each user has finished its call."""
        self._stop.set()
        self._goes_on.set()
        for thread in self._threads:
            thread.join()
        self.user.__exit__()
        assert not self.errors, self.errors

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no call inside the block, while a test waits for something that needs none."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def wait_for_calls(self, begun: int) -> None:
        """Wait until ``begun`` more calls have begun."""
        target = self.begun + begun
        until(lambda: self.begun >= target or self.errors, f"{begun} more calls")

    def wait_for_answers(self, answers: int) -> None:
        """Wait until ``answers`` more calls have been answered."""
        target = self.acknowledged + answers
        until(lambda: self.acknowledged >= target or self.errors, f"{answers} more answers")

    def _repeat(self, number: int, work: Callable[[str, Generator], None]) -> None:
        rng = np.random.default_rng((self._seed, number))
        turn = 0
        while not self._stop.wait(PAUSE_S):
            turn += 1
            self._goes_on.wait()
            try:
                work(f"{number}-{turn}", rng)
            except (grpc.RpcError, AssertionError) as error:
                self.errors.append(error)
                return

    def _begin(self) -> None:
        with self._lock:
            self.begun += 1

    def _submit(self, turn: str, rng: Generator) -> None:
        """Submit two jobs, one under a chosen name and one under a name from the server."""
        if len(self.submitted) - len(self.cancelled) > 2 * LIVE_JOBS:
            return
        labels = [f"{turn}-named", f"{turn}-unnamed"]
        inner = [
            jobs_pb2.SubmitJobRequest(
                job_id=f"job-{label}" if label.endswith("-named") else "",
                job=a_job_message(
                    int(rng.choice([1, 2, 4])), float(rng.integers(1, 9)), {"load": label}
                ),
            )
            for label in labels
        ]
        request = jobs_pb2.SubmitJobsRequest(
            parent=self._lab.parent, requests=inner, request_id=self._id(turn)
        )
        self._begin()
        answer = self.user.insist(lambda r: r.jobs.SubmitJobs(request, timeout=10), self.first)
        self.submitted.update({job.labels["load"]: job.name for job in answer.jobs})

    def _cancel(self, turn: str, rng: Generator) -> None:
        live = sorted(set(self.submitted.copy().values()) - self.cancelled)
        if len(live) <= LIVE_JOBS:
            return
        request = jobs_pb2.CancelJobRequest(name=str(rng.choice(live)), request_id=self._id(turn))
        self._begin()
        self.user.insist(lambda r: r.jobs.CancelJob(request, timeout=10), self.first)
        self.cancelled.add(request.name)

    def _schedule(self, turn: str, rng: Generator) -> None:
        request = scheduler_pb2.ScheduleRequest(
            parent=self._lab.parent,
            request_id=self._id(turn),
            summary_only=True,
            options=scheduler_pb2.RoundOptions(solver="greedy"),
        )
        self._begin()
        answer = self.user.insist(lambda r: r.scheduler.Schedule(request, timeout=10), self.first)
        self.rounds[request.request_id] = answer.name

    def _id(self, turn: str) -> str:
        return uuid(f"{self._lab.parent}/{self._seed}/{turn}")
