"""The end of a job for one agent."""

from dataclasses import dataclass

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir


@dataclass(frozen=True)
class End:
    """End of the job for this agent."""

    code: int
    """Exit code of the agent."""
    reason: str


def recorded_end(rundir: RunDir, reason: str) -> End:
    """Return the end that the run directory records; where it records none, another process has replaced this one.

    Args:
        reason: reason that the coordinator gives.
    """
    if rundir.done() is not None:
        return End(ExitCode.DONE, reason)
    if (failed := rundir.failed()) is not None:
        code = failed.get("exitCode")
        return End(code if isinstance(code, int) and 0 < code < 256 else ExitCode.FAILED, reason)
    return End(ExitCode.SUPERSEDED, reason)
