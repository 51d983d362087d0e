"""torchrun's rendezvous, decided by the job's coordinator: `torchrun --rdzv-backend=tandem`.

torchrun finds `lookup` through the entry point group `torchrun.handlers`. It calls `next_rendezvous` before it starts
its workers, and again after it has stopped them because one failed or because `num_nodes_waiting` said so.

Each generation gets a store of its own, on its first member, so that no key of an earlier one can be met. Every agent
opens the listening socket before it joins and tells the coordinator its port; the first member then serves the store on
it, so that no port is ever guessed, and the others' connections wait in the socket's queue until it does.

A signal that asks the agent to end is noted where it arrives and obeyed where torchrun asks the rendezvous something,
which it does as soon as the heartbeat has seen the signal. torchrun's own handler raises wherever the main thread
happens to be. Within Popen.poll, between the taking of its lock and the `try` that gives it back, the lock then stays
taken: torchrun waits without end for a rank that has ended, and on a busy machine one preemption in 40 lasted for the
pod's grace period.

Rejected: torchrun's own restart counting (a change of membership is no failure), sharing one store over generations
(stale keys), and RendezvousGracefulExitError at the end of the job: torchrun catches it and then trips over the result
it does not have, so the agent would end with a stack trace. SystemExit passes through with the right code.
"""

import atexit
import errno
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

from tandem.coordinator_client import CoordinatorClient, Refused
from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob, Ports
from tandem.launch import EVERYWHERE, GENERATION, NODE, PULSE, REPLICA, RUN_DIR, TOKEN, UID, listen, wait_for_job
from tandem.protocol import Membership
from tandem.rundir.layout import RunDir
from tandem.script import STEP_LOG
from tandem_trainer.agent_log import log, log_to_stderr
from tandem_trainer.gpu_watch import GpuWatch
from tandem_trainer.heartbeat import Heartbeat
from tandem_trainer.local_ranks import LocalRanks, remove_leavings
from tandem_trainer.preflight import processes
from tandem_trainer.warm.leftovers import end_group, end_leftovers, runs

GLOO = "GLOO_SOCKET_IFNAME"
"""The network interface of gloo; a user may have set it."""
ANSWER_SECONDS = 10.0
"""For the coordinator's answer, beyond the heartbeat time, for which it may hold it back."""
CONNECT_SECONDS = 2.0
"""For one try to reach the first member's store, so that a generation that is closed meanwhile is noticed."""
STORE_SECONDS = 20.0
"""For all tries; a first member that is alive and not reached in this time is taken for cut off."""
CUT_OFF_SECONDS = 8.0
"""After so long in vain it is no slow start any more."""
OPERATION_SECONDS = 300.0
"""For the store's own operations, torchrun's default."""
REST_SECONDS = 1.0
"""Between two of torchrun's looks at ranks of which nothing is heard."""
FINISHED = "tandem/finished"
"""Key of the store: how many agents besides the first one have ranks that have all ended with exit code 0."""
STORE_BACKLOG = 4096
"""Ranks that connect to a store at the same moment."""
LEFT_TO_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
"""The one signal that its handler may have. It reads the variable whenever it starts ranks."""


def lookup() -> RendezvousHandlerCreator:
    """What torchrun asks the entry point for."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous handler of this agent. A mistake in its surroundings ends the agent with one sentence."""
    log_to_stderr()
    try:
        return TandemRendezvous(parameters)
    except ValueError as error:
        log.error("%s", error)
        raise SystemExit(ExitCode.CONFIGURATION) from None
    except OSError as error:
        # A mount that is stale, a name that does not resolve: another try, perhaps on another node, may find it sound.
        log.error("%s", error)
        raise SystemExit(ExitCode.FAILED) from None


class TandemRendezvous(RendezvousHandler):
    """One agent's rendezvous.

    Raises:
        ValueError, OSError: a variable is missing, or what the run directory holds is no job.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        rundir = RunDir(_variable(RUN_DIR))
        spec = _job(rundir).spec
        self._processes = spec.workers.processes
        self._ports = spec.workers.store_ports
        # All replicas have the same number of ranks, so that torchrun need not ask the store for everybody's.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        self._heartbeat = Heartbeat(
            CoordinatorClient(
                parameters.endpoint, _variable(TOKEN), spec.elasticity.heartbeat_seconds + ANSWER_SECONDS
            ),
            rundir,
            os.environ.get(REPLICA) or socket.gethostname(),
            parameters.local_addr or socket.gethostbyname(socket.gethostname()),
            self._processes,
            os.environ.get(NODE) or None,
        )
        self._address = self._heartbeat.address
        if not os.environ.get(GLOO) and (interface := gloo_interface(self._address)):
            os.environ[GLOO] = interface
        self._cut_off = False
        remove_leavings()
        _look_when_needed(self._heartbeat)
        self._replace_exit_barrier()
        self._heartbeat.hear_signals()
        self._heartbeat.start()
        _hear_starts(self._heartbeat)
        self._gpus = GpuWatch()
        # torchrun does not shut its handler down when it is ended by a signal; the others should know all the same.
        atexit.register(self._heartbeat.leave)

    def get_backend(self) -> str:
        """The name after `--rdzv-backend`."""
        return "tandem"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the agents' store instead of opening another one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this agent in it, and connect to its store."""
        while True:
            self._obey()
            reason = "StoreUnreachable" if self._cut_off else self._heartbeat.why_again()
            self._cut_off = False
            listener = _listen(self._address, self._ports)
            try:
                membership = self._heartbeat.enter(listener.getsockname()[1], reason)
                if membership is None:
                    continue
                rank = self._index(membership)
                asked = self._heartbeat.preflight_asked
                patience = CUT_OFF_SECONDS if asked else STORE_SECONDS
                store = _serve(membership, listener) if rank == 0 else self._connect(membership, patience)
            except Refused as error:
                log.error("%s", error)
                raise SystemExit(ExitCode.FAILED) from None
            finally:
                listener.close()
            if asked and not self._fly(membership, rank, store):
                self._cut_off = False
                continue
            if store is None:
                continue
            self._start(membership)
            first = membership.members[0]
            log.info(
                "event=joined generation=%d index=%d replicas=%d reason=%s",
                *(membership.generation, rank, len(membership.members), membership.reason),
            )
            return RendezvousInfo(store, rank, len(membership.members), RendezvousStoreInfo(first.address, first.port))

    def num_nodes_waiting(self) -> int:
        """Positive once the generation is closed: torchrun then stops its workers and asks for the next one."""
        self._obey()
        return int(self._heartbeat.closed)

    def is_closed(self) -> bool:
        """Never: the end of the job is told when torchrun asks for the next generation."""
        return False

    def set_closed(self) -> None:
        """Nothing: the coordinator alone ends a job."""

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """This agent leaves for good. torchrun calls it on its way out, also with an exception."""
        error = sys.exc_info()[1]
        self._heartbeat.leave(error if isinstance(error, Exception) else None)
        return True

    def _replace_exit_barrier(self) -> None:
        """Have torchrun leave when its ranks have finished, instead of waiting in the store for the other agents.

        In torchrun's own barrier an agent waits for up to 300 s for a store that may be gone, hears no signal, and does
        not learn that the others start again. The store stays on the agent that serves it until no rank uses it: until
        the coordinator says that all ranks have ended, or the others have announced it in the store. That is the only
        sign that a coordinator of an earlier version, or one that is gone, does not take away.
        """

        def exit_barrier(agent: SimpleElasticAgent) -> None:
            # Scripts for preemptible machines end with 0 when they are asked to: that is not the end of the job.
            self._obey()
            group: Any = agent.get_worker_group()
            store: Any = agent._store
            if group.group_rank > 0:
                with suppress(DistError):
                    store.add(FINISHED, 1)
                self._heartbeat.finish(lambda: True)
            else:
                self._heartbeat.finish(lambda: store.add(FINISHED, 0) >= group.group_world_size - 1)

        SimpleElasticAgent._exit_barrier = exit_barrier  # type: ignore[method-assign]

    def _obey(self) -> None:
        """Raise what torchrun's handler would have raised, had it been its signal."""
        if (number := self._heartbeat.asked) is not None:
            raise SignalException(f"asked to end by {number.name}", sigval=number)

    def _index(self, membership: Membership) -> int:
        return [member.incarnation for member in membership.members].index(self._heartbeat.incarnation)

    def _fly(self, membership: Membership, rank: int, store: Store | None) -> bool:
        """Do the pre-flight, tell what it found, and wait for what the coordinator makes of it: whether the ranks may
        start. The store has to stay as long as others may use it."""
        heartbeat = self._heartbeat
        if store is None:
            report = None if heartbeat.closed else processes.unreached(membership)
        else:
            report = processes.run(membership, rank, lambda: not heartbeat.closed and heartbeat.asked is None)
        return report is not None and heartbeat.tell(report)

    def _connect(self, membership: Membership, patience: float) -> Store | None:
        """The store of the first member; None if the generation is closed before that is reached, or it takes longer
        than `patience` seconds."""
        first = membership.members[0]
        began = time.monotonic()
        while not self._heartbeat.closed:
            self._obey()
            try:
                store = TCPStore(
                    first.address,
                    first.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                )
            except DistError as error:
                if time.monotonic() - began > patience:
                    log.warning("event=store-unreachable replica=%s error=%r", first.replica, str(error))
                    self._cut_off = True
                    return None
                continue
            store.set_timeout(timedelta(seconds=OPERATION_SECONDS))
            return store
        # Another one gave up first. Who has tried in vain for long says so, too: it tells whose fault it is.
        self._cut_off = time.monotonic() - began > CUT_OFF_SECONDS
        return None

    def _start(self, membership: Membership) -> None:
        """Prepare for the ranks that torchrun is about to start; they inherit this process's environment."""
        before = membership.members[: self._index(membership)]
        first_rank = sum(member.processes for member in before)
        ranks = LocalRanks(membership.generation, self._processes, first_rank, self._gpus)
        os.environ[GENERATION] = str(membership.generation)
        os.environ[PULSE] = str(ranks.folder)
        os.environ[STEP_LOG] = "tandem_trainer.step_log"
        os.environ.update(LEFT_TO_TORCHRUN)
        self._heartbeat.watch(ranks)


def gloo_interface(address: str) -> str | None:
    """The network interface of our address, where gloo has to be told.

    By itself it takes the address that the host name leads to. Where nobody knows that name, or it leads to the
    loopback as Debian writes it into /etc/hosts, ranks on other nodes could not reach ours.
    """
    known: set[str] = set()
    with suppress(OSError):
        known = {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    if ip_address(address).is_loopback or not all(ip_address(one.partition("%")[0]).is_loopback for one in known):
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if any(one.address == address for one in own)), None)


def _look_when_needed(heartbeat: Heartbeat) -> None:
    """Have torchrun look at its ranks when there is something to see, and tell how they failed.

    By itself it looks 20 times a second, which took 3 ms of each second of a core from the ranks. And it tells its
    rendezvous that ranks have failed, and not how. It takes exit code 0 for a completion, which is for the session
    to say.
    """
    looked, closed = PContext.wait, PContext.close

    def close(context: PContext, *arguments: Any, **named: Any) -> None:
        # Of a rank that has ended by itself, torchrun leaves what it has started.
        pids = context.pids().values()
        for pid in pids:
            end_leftovers(pid)
        running = [pid for pid in pids if runs(pid)]
        closed(context, *arguments, **named)
        # And of one that it ends, what has not heard the signal, or does not obey it.
        for pid in running:
            end_group(pid)

    def wait(context: PContext, *arguments: float, **named: float) -> RunProcsResult | None:
        heartbeat.rest(REST_SECONDS)
        for pid in context.pids().values():
            end_leftovers(pid)
        found = looked(context, *arguments, **named)
        if found is not None and found.failures:
            heartbeat.ended({local_rank: failure.exitcode for local_rank, failure in found.failures.items()})
        elif found is not None:
            early = heartbeat.stopped_early().items()
            found.failures = {rank: ProcessFailure(rank, pid, ExitCode.DONE, "") for rank, pid in early}
        return found

    PContext.wait = wait  # type: ignore[method-assign,assignment]
    PContext.close = close  # type: ignore[method-assign,assignment]


def _serve(membership: Membership, listener: socket.socket) -> Store:
    first = membership.members[0]
    return TCPStore(
        first.address,
        first.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=OPERATION_SECONDS),
    )


def _hear_starts(heartbeat: Heartbeat) -> None:
    """Be told which processes the ranks are: a script of the user's own may say nothing."""
    began = PContext.start

    def start(context: PContext) -> None:
        began(context)
        heartbeat.started(context.pids())

    PContext.start = start  # type: ignore[method-assign,assignment]


def _listen(address: str, ports: Ports | None) -> socket.socket:
    """A socket that listens on a free port of the address that the others are told, and of no other: a store is open to
    whoever reaches it. Of all addresses where that one is not the machine's own, as behind a translation.

    Raises:
        OSError: none of the ports is free.
    """
    busy = None
    for port in [0] if ports is None else range(ports.first, ports.last + 1):
        for host in (address, EVERYWHERE):
            try:
                return listen(host, port, STORE_BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    busy = error
                    break
                if host == EVERYWHERE:
                    raise
                log.warning("event=listening-everywhere address=%s error=%r", address, str(error))
    assert ports is not None
    raise OSError(
        errno.EADDRINUSE, f"no port from {ports.first} to {ports.last} (workers.storePorts) is free"
    ) from busy


def _job(rundir: RunDir) -> DistributedTrainingJob:
    job = wait_for_job(rundir, log.info, os.environ.get(UID, ""))
    if job is None:
        raise ValueError(f"the job has failed before it began; {rundir.failed_file} says why")
    return job


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"set {name}; tandem run and the operator do")
    return value
