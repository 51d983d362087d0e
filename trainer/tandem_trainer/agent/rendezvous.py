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

Ranks that can go on in another group (tandem_trainer.regroup) are not stopped. When their generation is over, torchrun
asks for the number of waiting nodes; this agent then joins the next generation right there, gives the ranks their new
places through their pulses, and answers that nobody waits.

Such ranks also start before this agent joins, so that a group that trains does not wait for them: torchrun is given a
group of this agent alone, the ranks prepare themselves outside of it (`STANDBY`) and park, and this agent joins as
after the end of a generation.

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
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

from tandem.job.resource import DistributedTrainingJob, Ports
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import (
    ALL_ADDRESSES,
    FAILED_STANDBY,
    GENERATION,
    MIRROR,
    NODE,
    PULSE,
    REPLICA,
    RUN_DIR,
    STANDBY,
    TOKEN,
    UID,
    listen,
    wait_for_job,
)
from tandem.rundir.layout import RunDir
from tandem.script import STEP_LOG
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused
from tandem.wire.protocol import Membership
from tandem_trainer.agent.gpu_watch import GpuWatch
from tandem_trainer.agent.heartbeat import Heartbeat, RanksEnded
from tandem_trainer.agent.local_ranks import LocalRanks, remove_stale_folders
from tandem_trainer.agent.log import log, log_to_stderr
from tandem_trainer.agent.preflight import processes
from tandem_trainer.agent.warm.leftovers import end_group, end_leftovers, runs

if TYPE_CHECKING:
    # torch loads this module for its entry point, also in the middle of this import: any program that imports
    # transformers' Trainer or accelerate would show the error of a circle.
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface of gloo; a user may have set it."""
ANSWER_SECONDS = 10.0
"""Time limit of a coordinator's answer, beyond the heartbeat time for which it may hold the answer back, in seconds."""
CONNECT_SECONDS = 2.0
"""Time limit of one attempt to reach the first member's store, in seconds; short, so that a closed generation is
noticed."""
STORE_SECONDS = 20.0
"""Time limit of all attempts, in seconds; a first member that is alive and not reached in this time counts as cut
off."""
CUT_OFF_SECONDS = 8.0
"""Time without a connection after which a slow start is ruled out, in seconds."""
OPERATION_SECONDS = 300.0
"""Timeout of the store's operations, torchrun's default, in seconds."""
POLL_SECONDS = 1.0
"""Interval at which torchrun polls ranks of which no event arrives, in seconds."""
FINISHED = "tandem/finished"
"""Key of the store: how many agents besides the first one have ranks that have all ended with exit code 0."""
STORE_BACKLOG = 4096
"""Backlog of the store's listening socket: ranks that connect at the same moment."""
TORCHRUN_SIGNALS = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
"""Environment that leaves torchrun's handler one signal only. torchrun reads it whenever it starts ranks."""


def lookup() -> RendezvousHandlerCreator:
    """Entry point of the group `torchrun.handlers`."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous handler of this agent. A mistake in its environment ends the agent with one sentence."""
    log_to_stderr()
    try:
        return TandemRendezvous(parameters)
    except ValueError as error:
        log.error("%s", error)
        raise SystemExit(ExitCode.CONFIGURATION) from None
    except OSError as error:
        # A stale mount, a name that does not resolve: another attempt, perhaps on another node, may succeed.
        log.error("%s", error)
        raise SystemExit(ExitCode.FAILED) from None


class TandemRendezvous(RendezvousHandler):
    """Rendezvous handler of one agent.

    Raises:
        ValueError, OSError: a variable is missing, or the run directory holds no job.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        rundir = RunDir(_variable(RUN_DIR))
        job = _job(rundir)
        spec = job.spec
        self._processes = spec.workers.processes
        self._ports = spec.workers.store_ports
        self._rundir = rundir
        self._regroups = spec.regroups and _can_regroup(job)
        self._is_script = spec.trainer.command is not None
        self._has_failed_in_standby = self._has_ended_parked = False
        self._generation = 0
        """The newest generation that this agent has joined."""
        self._ranks: LocalRanks | None = None
        """The ranks that torchrun has started last."""
        self._preparation_seconds = spec.elasticity.hang_start_seconds
        # All replicas have the same number of ranks, so that torchrun need not collect the numbers through the store.
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
        if not os.environ.get(GLOO_INTERFACE) and (interface := gloo_interface(self._address)):
            os.environ[GLOO_INTERFACE] = interface
        self._cut_off = False
        self._member_index = self._members = 0
        self._store: Store | None = None
        if spec.elasticity.mirror and hasattr(os, "memfd_create"):
            # It imports what saves checkpoints, which other agents do without.
            from tandem_trainer.checkpoint.mirror import create_memory

            # It lives as long as this agent, so longer than its ranks.
            os.environ[MIRROR] = create_memory(self._processes)
        # Agents that were killed cannot remove their folders in memory themselves.
        remove_stale_folders()
        _wrap_polling(self._heartbeat)
        self._replace_exit_barrier()
        self._heartbeat.install_signal_handlers()
        self._heartbeat.start()
        _wrap_start(self._heartbeat)
        self._gpus = GpuWatch()
        # torchrun does not shut down its handler when a signal ends it. The coordinator should know all the same.
        atexit.register(self._heartbeat.leave)

    def get_backend(self) -> str:
        """The name after `--rdzv-backend`."""
        return "tandem"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the agents' store instead of opening another one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation with this agent in it, and connect to its store; or, where ranks prepare themselves
        before that, return a group of this agent alone."""
        self._update_standby_failure()
        if self._starts_in_standby():
            reason = self._heartbeat.join_reason()
            if not self._heartbeat.is_over:
                return self._prepare(reason)
        membership, store = self._join()
        self._start(membership.generation, membership.first_rank(self._member_index))
        first = membership.members[0]
        return RendezvousInfo(
            store, self._member_index, len(membership.members), RendezvousStoreInfo(first.address, first.port)
        )

    def _update_standby_failure(self) -> None:
        """Record whether ranks have failed while they prepared themselves. It counts until a group has begun without
        that; ranks that were parked have not failed."""
        if self._heartbeat.is_preparing:
            self._has_failed_in_standby |= not self._has_ended_parked
        elif self._has_failed_in_standby and self._rundir.generation_record(self._generation) is not None:
            self._has_failed_in_standby = False
        self._has_ended_parked = False

    def _starts_in_standby(self) -> bool:
        """Whether ranks start before this agent joins. Not for the first generation, which waits for all of them, nor
        after ranks have failed in it: the failure then counts as one of a member. A script only if its last ranks had a
        session that can go on in another group: any other one would train on its own. Nor after a mixed group: next
        time all its ranks come from the beginning of the script."""
        if not self._regroups or self._heartbeat.is_preparing or self._heartbeat.is_over:
            return False
        newest = self._rundir.newest_generation()
        if not self._is_script or newest == 0:
            return newest > 0
        if self._has_failed_in_standby or (self._ranks is not None and self._ranks.any_mixed):
            return False
        record = self._rundir.generation_record(newest)
        return record is not None and record.standby

    def _prepare(self, reason: str) -> RendezvousInfo:
        """Prepare the start of ranks that have no place yet.

        Args:
            reason: reason for which this agent will join.
        """
        self._start(generation=0, first_rank=0, reason=reason)
        # Nobody uses this store: ranks in standby open none, and get the address of another one with their place.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._address, 0))

    def _join(self, ranks: LocalRanks | None = None) -> tuple[Membership, Store]:
        """Join a generation, and connect to its store.

        Args:
            ranks: ranks that wait for it.

        Raises:
            RanksEnded: one of them has ended.
        """
        while True:
            self._raise_if_signalled()
            reason = "StoreUnreachable" if self._cut_off else self._heartbeat.join_reason()
            self._cut_off = False
            # Open the socket before joining: the others learn the port with the membership, and their connections wait
            # in its queue until the store is served.
            listener = _listen(self._address, self._ports)
            try:
                regroups = self._regroups and (ranks is not None or not self._is_script)
                membership = self._heartbeat.enter(listener.getsockname()[1], reason, ranks, regroups)
                if membership is None:
                    continue
                rank = self._index(membership)
                has_preflight = self._heartbeat.has_preflight
                # A pre-flight reports what it could not reach, so it waits less.
                patience = CUT_OFF_SECONDS if has_preflight else STORE_SECONDS
                store = _serve(membership, listener) if rank == 0 else self._connect(membership, patience)
            except CoordinatorRefused as error:
                log.error("%s", error)
                raise SystemExit(ExitCode.FAILED) from None
            finally:
                listener.close()
            if has_preflight and not self._run_preflight(membership, rank, store):
                self._cut_off = False
                continue
            # The generation was closed, or its first member could not be reached: join again, with that reason.
            if store is None:
                continue
            # torchrun keeps what it got with the first generation of its ranks, which may live through several.
            self._member_index, self._members, self._store = rank, len(membership.members), store
            self._generation = membership.generation
            log.info(
                "event=joined generation=%d index=%d replicas=%d reason=%s",
                *(membership.generation, rank, len(membership.members), membership.reason),
            )
            return membership, store

    def num_nodes_waiting(self) -> int:
        """Return 1 once the generation is closed: torchrun then stops its workers and asks for the next one. Where the
        ranks can go on in the next one, join it, and return 0."""
        takes_too_long = self._heartbeat.end_preparation(self._preparation_seconds)
        self._raise_if_signalled()
        if takes_too_long:
            return 1
        if self._heartbeat.is_preparing and not self._heartbeat.are_prepared:
            return 0
        return int(self._heartbeat.closed and not self._regroup())

    def _regroup(self) -> bool:
        """Take the ranks, which live, to the next generation; return whether they could go."""
        ranks = self._heartbeat.release_ranks()
        if ranks is None:
            return False
        try:
            membership, _ = self._join(ranks)
            os.environ[GENERATION] = str(membership.generation)
            ranks.enter(membership, self._member_index)
        except RanksEnded:
            log.warning("event=rank-ended-while-it-waited generation=%d", ranks.generation)
            ranks.close()
            self._has_ended_parked = True
            return False
        except BaseException:
            ranks.close()
            raise
        self._heartbeat.watch(ranks)
        return True

    def is_closed(self) -> bool:
        """Always False: the job's end is reported when torchrun asks for the next generation."""
        return False

    def set_closed(self) -> None:
        """Do nothing: only the coordinator ends a job."""

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the job for good. torchrun calls it on its way out, also with an exception."""
        error = sys.exc_info()[1]
        self._heartbeat.leave(error if isinstance(error, Exception) else None)
        return True

    def _replace_exit_barrier(self) -> None:
        """Make torchrun leave when its ranks have finished, instead of waiting in the store for the other agents.

        In torchrun's own barrier an agent waits for up to 300 s for a store that may be gone, hears no signal, and does
        not learn that the others start again. The store stays on the agent that serves it until no rank uses it: until
        the coordinator says that all ranks have ended, or the others have announced it in the store. That is the only
        sign that a coordinator of an earlier version, or one that is gone, does not take away.
        """

        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        def exit_barrier(agent: "SimpleElasticAgent") -> None:
            # Scripts for preemptible machines end with 0 when they are asked to leave: that does not complete the job.
            self._raise_if_signalled()
            if self._heartbeat.is_preparing:
                log.error("event=ended-in-standby: the ranks exited with 0 before they had a place in a group")
                raise SystemExit(ExitCode.FAILED)
            store: Any = self._store
            # The first agent serves the store, so it leaves last; the others announce themselves in it, and leave at
            # once.
            if self._member_index > 0:
                with suppress(DistError):
                    store.add(FINISHED, 1)
                self._heartbeat.finish(lambda: True)
            else:
                self._heartbeat.finish(lambda: store.add(FINISHED, 0) >= self._members - 1)

        SimpleElasticAgent._exit_barrier = exit_barrier  # type: ignore[method-assign]

    def _raise_if_signalled(self) -> None:
        """Raise what torchrun's signal handler would have raised, if a signal has asked this agent to end."""
        if (number := self._heartbeat.end_signal) is not None:
            raise SignalException(f"asked to end by {number.name}", sigval=number)

    def _index(self, membership: Membership) -> int:
        return [member.incarnation for member in membership.members].index(self._heartbeat.incarnation)

    def _run_preflight(self, membership: Membership, rank: int, store: Store | None) -> bool:
        """Run the pre-flight, report its result, and wait for the coordinator's decision: whether the ranks may start.
        The store has to stay as long as others may use it."""
        heartbeat = self._heartbeat
        if store is None:
            report = None if heartbeat.closed else processes.unreached(membership)
        else:
            report = processes.run(membership, rank, lambda: not heartbeat.closed and heartbeat.end_signal is None)
        return report is not None and heartbeat.report_preflight(report)

    def _connect(self, membership: Membership, patience: float) -> Store | None:
        """Connect to the store of the first member; None if the generation is closed before that, or it takes longer
        than `patience` seconds."""
        first = membership.members[0]
        started_at = time.monotonic()
        while not self._heartbeat.closed:
            self._raise_if_signalled()
            try:
                store = TCPStore(
                    first.address,
                    first.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                )
            except DistError as error:
                if time.monotonic() - started_at > patience:
                    log.warning("event=store-unreachable replica=%s error=%r", first.replica, str(error))
                    self._cut_off = True
                    return None
                continue
            store.set_timeout(timedelta(seconds=OPERATION_SECONDS))
            return store
        # The generation is closed, because another agent gave up first. An agent that also tried for long says so: that
        # tells which side is cut off.
        self._cut_off = time.monotonic() - started_at > CUT_OFF_SECONDS
        return None

    def _start(self, generation: int, first_rank: int, reason: str | None = None) -> None:
        """Prepare the environment, which the ranks inherit, and the pulses of the ranks that torchrun is about to
        start.

        Args:
            reason: reason for which this agent will join, where the ranks start before that.
        """
        ranks = self._ranks = LocalRanks(generation, self._processes, first_rank, self._gpus)
        os.environ[GENERATION] = str(generation)
        os.environ[PULSE] = str(ranks.folder)
        os.environ[STEP_LOG] = "tandem_trainer.step_log"
        os.environ.update(TORCHRUN_SIGNALS)
        os.environ.pop(FAILED_STANDBY, None)
        if self._has_failed_in_standby:
            os.environ[FAILED_STANDBY] = "1"
        if reason is None:
            os.environ.pop(STANDBY, None)
            self._heartbeat.watch(ranks)
        else:
            os.environ[STANDBY] = "1"
            self._heartbeat.prepare(ranks, reason)


def gloo_interface(address: str) -> str | None:
    """Return the network interface of an address, if gloo has to be told; None otherwise.

    By default gloo takes the address that the host name leads to. Where the name does not resolve, or leads to the
    loopback as Debian writes it into /etc/hosts, ranks on other nodes could not reach this one.
    """
    host_addresses: set[str] = set()
    with suppress(OSError):
        host_addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    if ip_address(address).is_loopback or not all(
        ip_address(name.partition("%")[0]).is_loopback for name in host_addresses
    ):
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(own.address == address for own in addresses)), None)


def _wrap_polling(heartbeat: Heartbeat) -> None:
    """Make torchrun poll its ranks when there is an event, and report how they failed.

    By default torchrun polls 20 times a second, which took 3 ms of each second of a core from the ranks. It does not
    tell its rendezvous how ranks failed. And it takes exit code 0 for a completion, which only the session knows.
    """
    original_wait, original_close = PContext.wait, PContext.close

    def close(context: PContext, *arguments: Any, **options: Any) -> None:
        # torchrun leaves the child processes of a rank that has ended by itself.
        pids = context.pids().values()
        for pid in pids:
            end_leftovers(pid)
        running = [pid for pid in pids if runs(pid)]
        original_close(context, *arguments, **options)
        # And those of a rank that it ends, if they have not got the signal, or do not obey it.
        for pid in running:
            end_group(pid)

    def wait(context: PContext, *arguments: float, **options: float) -> RunProcsResult | None:
        heartbeat.wait_for_event(POLL_SECONDS)
        for pid in context.pids().values():
            end_leftovers(pid)
        result = original_wait(context, *arguments, **options)
        if result is not None and result.failures:
            heartbeat.ended({local_rank: failure.exitcode for local_rank, failure in result.failures.items()})
        elif result is not None:
            # torchrun takes exit code 0 for a completion. A session that ended before its last step has failed.
            early = heartbeat.stopped_early().items()
            result.failures = {rank: ProcessFailure(rank, pid, ExitCode.DONE, "") for rank, pid in early}
        return result

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


def _wrap_start(heartbeat: Heartbeat) -> None:
    """Report the process numbers of the ranks to the heartbeat: a script may have no pulse."""
    original_start = PContext.start

    def start(context: PContext) -> None:
        original_start(context)
        heartbeat.started(context.pids())

    PContext.start = start  # type: ignore[method-assign,assignment]


def _listen(address: str, ports: Ports | None) -> socket.socket:
    """Open a socket on a free port of the address that the other members get, and on no other address: a store is open
    to whoever reaches it. If that address is not the machine's own, as behind an address translation, listen on all.

    Raises:
        OSError: none of the ports is free.
    """
    busy = None
    for port in [0] if ports is None else range(ports.first, ports.last + 1):
        # A busy port is busy on all addresses. Any other error says that the address is not this machine's own.
        for host in (address, ALL_ADDRESSES):
            try:
                return listen(host, port, STORE_BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    busy = error
                    break
                if host == ALL_ADDRESSES:
                    raise
                log.warning("event=listening-everywhere address=%s error=%r", address, str(error))
    assert ports is not None
    raise OSError(
        errno.EADDRINUSE, f"no port from {ports.first} to {ports.last} (workers.storePorts) is free"
    ) from busy


def _can_regroup(job: DistributedTrainingJob) -> bool:
    """Whether the ranks of a job will find that they can go on in another group."""
    # Imported here: other jobs do not need them.
    from tandem_trainer.process_group import rank_device
    from tandem_trainer.regroup import can_regroup

    return can_regroup(job, rank_device())


def _job(rundir: RunDir) -> DistributedTrainingJob:
    job = wait_for_job(rundir, log.info, os.environ.get(UID, ""))
    if job is None:
        raise ValueError(f"the job failed before it started; {rundir.failed_file} says why")
    return job


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"set {name}; tandem run and the operator do")
    return value
