"""A program of ``netns.Race`` that sends two UDP flows at full speed, or counts their bytes."""

from __future__ import annotations

import select
import socket
import sys

SO_SNDBUFFORCE = 32  # asm-generic/socket.h; not in this Python's socket module
PORTS = (5001, 5002)
BUFFER_BYTES = 2**20
"""Number of bytes that a flow may have queued. They last while a busy machine delays the sender, so
that both flows always compete."""

ON_THE_WAY = 2_500_000
"""Number of bytes that are skipped at first. It exceeds the queues of both flows and the receiver's
buffers together."""


def send(address: str, tags: list[int]) -> None:
    poll = select.poll()
    flows = {}
    for port, tag in zip(PORTS, tags, strict=True):
        flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        flow.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tag << 2)
        flow.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
        flow.setblocking(False)
        flow.connect((address, port))
        poll.register(flow, select.POLLOUT)
        flows[flow.fileno()] = flow
    while True:
        for descriptor, _ in poll.poll():
            try:
                flows[descriptor].send(bytes(1400))
            except (BlockingIOError, ConnectionRefusedError):
                continue


def receive(address: str) -> None:
    poll = select.poll()
    flows = {}
    for number, port in enumerate(PORTS):
        flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        flow.bind((address, port))
        poll.register(flow, select.POLLIN)
        flows[flow.fileno()] = (number, flow)
    poll.register(sys.stdin, select.POLLIN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    got, passed, wanted = [0, 0], 0, 0
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == sys.stdin.fileno():
                got, passed, wanted = [0, 0], 0, int(sys.stdin.readline() or sys.exit())
                continue
            number, flow = flows[descriptor]
            size = len(flow.recv(2048))
            passed += size
            if passed > ON_THE_WAY:
                got[number] += size
            if wanted and sum(got) >= wanted:
                sys.stdout.write(f"{got[0]} {got[1]}\n")
                sys.stdout.flush()
                wanted = 0


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], [int(tag) for tag in sys.argv[3:]])
    else:
        receive(sys.argv[2])
