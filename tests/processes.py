"""What tests ask of processes that are not their children."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether it runs: a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
