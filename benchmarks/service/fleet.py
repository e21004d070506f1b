"""A simulated fleet of agents that uses the real protocol with its own clock.

It speaks ``Agents.Sync`` over a real socket like any agent, for all nodes of a cluster. Its jobs
advance only when the driver calls ``advance``. For example, ``advance(300)`` trains for the length
of a round.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from tessera.client import PLAIN_TEXT, open_channel
from tessera.formulation.records.clusters import NodeSpec
from tessera.v1 import agents_pb2, agents_pb2_grpc

_Phase = agents_pb2.ObservedGang


@dataclass(slots=True)
class _JobProgress:
    """A job's progress, which is kept across its gangs."""

    iterations: float
    restart_left_s: float
    generation: int


class Fleet:
    """The agents of all nodes of one cluster, used as a context manager."""

    def __init__(self, address: str, cluster: str, nodes: Sequence[NodeSpec], agent: str) -> None:
        self._channel = open_channel(
            address, PLAIN_TEXT, [("grpc.max_receive_message_length", 64 << 20)]
        )
        self._outbox: queue.SimpleQueue[agents_pb2.AgentMessage | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._desired = agents_pb2.Desired()
        self._runs: dict[str, _JobProgress] = {}
        self._welcome = threading.Event()
        self._heartbeat_s = 5.0
        self._closed = threading.Event()
        self.error: grpc.RpcError | None = None
        hello = agents_pb2.Hello(
            parent=f"clusters/{cluster}",
            agent_id=agent,
            incarnation=uuid.uuid4().hex,
            version="bench",
            nodes=[
                agents_pb2.AgentNode(node=n.name, gpu_type=n.gpu_type, gpus=n.gpus, rack=n.rack)
                for n in nodes
            ],
        )
        self._outbox.put(agents_pb2.AgentMessage(hello=hello))
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._beat, daemon=True),
        ]

    def __enter__(self) -> Fleet:
        """Connect, and wait for the server's welcome."""
        for thread in self._threads:
            thread.start()
        if not self._welcome.wait(60):
            raise TimeoutError(f"no welcome from the server: {self.error}")
        return self

    def __exit__(self, *_: object) -> None:
        """End the stream."""
        self._closed.set()
        self._outbox.put(None)
        self._channel.close()
        for thread in self._threads:
            thread.join(10)

    def advance(self, seconds: float) -> list[str]:
        """Train every running gang for ``seconds``, report, and return the finished jobs."""
        done = []
        with self._lock:
            for gang in self._desired.gangs:
                run = self._run(gang)
                waited = min(seconds, run.restart_left_s)
                run.restart_left_s -= waited
                run.iterations += (seconds - waited) / gang.iter_time_s
                if run.iterations >= gang.iterations_total:
                    run.iterations = gang.iterations_total
                    done.append(gang.job)
        self._report()
        return done

    def busy(self) -> bool:
        """Return whether any job runs."""
        with self._lock:
            return bool(self._desired.gangs)

    def _run(self, gang: agents_pb2.DesiredGang) -> _JobProgress:
        run = self._runs.get(gang.job)
        if run is None or run.generation != gang.generation:
            before = run.iterations if run else gang.iterations_done
            run = _JobProgress(before, gang.restart_s, gang.generation)
            self._runs[gang.job] = run
        return run

    def _report(self) -> None:
        with self._lock:
            observed = agents_pb2.Observed(revision=self._desired.revision)
            for gang in self._desired.gangs:
                run = self._run(gang)
                ended = run.iterations >= gang.iterations_total
                for share in gang.shares:
                    observed.gangs.add(
                        job=gang.job,
                        generation=gang.generation,
                        node=share.node,
                        phase=_Phase.SUCCEEDED if ended else _Phase.RUNNING,
                        iterations_done=run.iterations if share.node == gang.leader else -1.0,
                        iter_time_s=gang.iter_time_s,
                    )
        self._outbox.put(agents_pb2.AgentMessage(observed=observed))

    def _messages(self) -> Iterator[agents_pb2.AgentMessage]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _listen(self) -> None:
        stub = agents_pb2_grpc.AgentsStub(self._channel)
        try:
            for message in stub.Sync(self._messages()):
                if message.HasField("welcome"):
                    self._heartbeat_s = message.welcome.heartbeat_s
                    self._welcome.set()
                else:
                    with self._lock:
                        changed = message.desired != self._desired
                        self._desired = message.desired
                    if changed:
                        self._report()
        except grpc.RpcError as error:
            if not self._closed.is_set():
                self.error = error
                raise

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            self._outbox.put(agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()))
