"""The rounds that a replica lists."""

from __future__ import annotations

from tessera.service.cli.demo.drive import PARENT
from tessera.v1 import scheduler_pb2, scheduler_pb2_grpc


def list_rounds(stub: scheduler_pb2_grpc.SchedulerStub) -> list[scheduler_pb2.Round]:
    rounds: list[scheduler_pb2.Round] = []
    token = ""
    while True:
        answer = stub.ListRounds(
            scheduler_pb2.ListRoundsRequest(parent=PARENT, page_size=100, page_token=token)
        )
        rounds.extend(answer.rounds)
        token = answer.next_page_token
        if not token:
            return rounds
