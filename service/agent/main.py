"""The command ``tessera-agent``, which runs on a GPU node what the servers want."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
import uuid
from collections.abc import Sequence

from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.base.logs import begin_ids, make_handler
from tessera.formulation.job.runtime_offers import NO_OFFERS
from tessera.formulation.job.runtimes import DEFAULT_RUNTIME
from tessera.service.agent.credentials import Credentials
from tessera.service.agent.hardware import command as health
from tessera.service.agent.hardware.monitor import start_monitor
from tessera.service.agent.lease import read_boot_s
from tessera.service.agent.log_pruner import keep_logs_within
from tessera.service.agent.network import command as network
from tessera.service.agent.network.map_worker import NetworkMapWorker
from tessera.service.agent.network.node import NodeNetwork
from tessera.service.agent.network.sampling import TrafficSampler
from tessera.service.agent.runtimes.offers import OfferWatch, add_offers
from tessera.service.agent.runtimes.options import offer_settings
from tessera.service.agent.runtimes.programs import LOGS
from tessera.service.agent.runtimes.protocol import RuntimeChooser
from tessera.service.agent.settings import AgentConfig, build_config, make_parser, make_runtimes
from tessera.service.agent.state import StateDir
from tessera.service.agent.stream import (
    AgentLease,
    AgentSuperseded,
    ServerLink,
    watch_lease,
)
from tessera.service.agent.supervisor import Supervisor
from tessera.service.agent.warden_process import keep_warden

log = logging.getLogger(__name__)

EXIT_INVALID, EXIT_SUPERSEDED = 2, 3


class _LeaveRequest(Exception):
    """A request that the agent end."""


async def run_agent(
    config: AgentConfig,
    runtimes: RuntimeChooser,
    leave: asyncio.Event,
    renew: asyncio.Event | None = None,
) -> None:
    """Run the agent until ``leave`` is set. Renew its certificate whenever ``renew`` is set.

    Its children continue to run, unless ``config.stop_on_exit`` is set.

    Raises:
        InvalidInput: another user could write to the data directory.
        NotAllowed: another agent runs on the same data directory.
        AgentSuperseded: a newer incarnation has taken over the nodes; the children have been stopped.
    """
    state = StateDir(config.data_dir.resolve(), config.checkpoints.resolve() / config.cluster)
    state.claim()
    try:
        async with asyncio.TaskGroup() as tasks:
            changed = asyncio.Event()
            sampling = _sampling(config)
            supervisor = Supervisor(
                runtimes,
                state,
                grace_s=config.grace_s,
                spawn=tasks.create_task,
                changed=changed.set,
                network=_carrying(config, tasks),
                sampling=sampling,
            )
            supervisor.adopt()
            if sampling is not None:
                tasks.create_task(sampling.watch(supervisor.live, changed.set))
            offers = runtimes.offers
            lease = AgentLease(state, read_boot_s, config.timing.lease_s)
            link = ServerLink(
                servers=config.servers,
                credentials=config.credentials,
                hello=add_offers(config.hello(), offers.offers if offers else NO_OFFERS),
                supervisor=supervisor,
                lease=lease,
                timing=config.timing,
                changed=changed,
                leave=leave,
                clock=read_boot_s,
                health=start_monitor(
                    config.health, tasks.create_task, changed.set, supervisor.live
                ),
                logs=config.data_dir.resolve() / LOGS,
            )
            if offers is not None:
                tasks.create_task(offers.watch(link.offer))
            tasks.create_task(watch_lease(lease, supervisor))
            tasks.create_task(keep_warden(config.data_dir.resolve()))
            logs = config.data_dir.resolve() / LOGS
            tasks.create_task(keep_logs_within(logs, config.logs, supervisor.live))
            tasks.create_task(
                _stay_connected(link, supervisor, config.credentials, renew or asyncio.Event())
            )
            await leave.wait()
            if config.stop_on_exit:
                await supervisor.close()
            raise _LeaveRequest
    except* _LeaveRequest:
        log.info("leaving", extra={"event": "agent_left"})
    finally:
        state.release()


async def _stay_connected(
    link: ServerLink, supervisor: Supervisor, credentials: Credentials, renew: asyncio.Event
) -> None:
    """Keep the credentials valid and the stream open.

    If the agent can never connect, or another process has taken over, all gangs are stopped. That
    process cannot adopt the gangs: this process holds the data directory, so the other one has
    a different directory. It starts the same gangs itself, and nobody would ever stop the ones
    started here.

    Raises:
        InvalidInput: there are no credentials. AgentSuperseded: another process has taken over.
    """
    renewing = None
    try:
        await credentials.prepare()
        renewing = asyncio.create_task(credentials.keep(link.renew, renew))
        await link.run()
    except AgentSuperseded:
        log.error(
            "replaced by another process; stopping all gangs", extra={"event": "agent_superseded"}
        )
        await supervisor.close()
        raise
    except InvalidInput:
        await supervisor.close()
        raise
    finally:
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


def _carrying(config: AgentConfig, tasks: asyncio.TaskGroup) -> NetworkMapWorker | None:
    """Return the object that applies the network plan, or None if no back end is configured."""
    if not config.backends:
        return None
    clock = time.monotonic
    nodes = [NodeNetwork([b], clock=clock, launch=config.launch) for b in config.backends]
    return NetworkMapWorker(nodes, clock=clock, spawn=tasks.create_task)


def _sampling(config: AgentConfig) -> TrafficSampler | None:
    """Return the object that measures the traffic of gangs, or None if none is to be measured."""
    if config.sent_bytes is None:
        return None
    return TrafficSampler(
        config.sent_bytes, window_s=config.measure_s, clock=time.monotonic, sleep=time.sleep
    )


async def _serve_until_signal(config: AgentConfig, runtimes: RuntimeChooser) -> None:
    begin_ids(cluster=config.cluster, agent=config.agent_id)
    leave, renew, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    # Not SIGHUP: an agent in a terminal that is closed must end.
    loop.add_signal_handler(signal.SIGUSR1, renew.set)
    await run_agent(config, runtimes, leave, renew)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent, ``network ...`` or ``health ...``, and return the exit status.

    The status is 2 if a setting is wrong and 3 if the agent was superseded.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["network"]:
        return network.main(given[1:])
    if given[:1] == ["health"]:
        return health.main(given[1:])
    options = make_parser().parse_args(given)
    logging.basicConfig(level=options.log_level, handlers=[make_handler(options.log_format)])
    status = 0
    try:
        config = build_config(options, uuid.uuid4().hex)
        offers = OfferWatch(offer_settings(options, config.servers))
        offers.refresh()
        runtimes = RuntimeChooser(make_runtimes(options, config), DEFAULT_RUNTIME, offers)
        asyncio.run(_serve_until_signal(config, runtimes))
    except* AgentSuperseded as group:
        status = EXIT_SUPERSEDED
        log.error("the agent ends", extra={"event": "agent_failed", "error": group.exceptions[0]})
    except* (TesseraError, OSError) as group:
        status = EXIT_INVALID
        log.error("the agent ends", extra={"event": "agent_failed", "error": group.exceptions[0]})
    return status


if __name__ == "__main__":
    sys.exit(main())
