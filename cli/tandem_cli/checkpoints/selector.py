"""Resolves what the user wrote to a checkpoint: a name, a step, `latest`, `best` or `final`."""

from difflib import get_close_matches

from tandem.errors import UserError, join_names
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import checkpoint_name
from tandem_cli.checkpoints.inventory import Entry, Inventory

ALIASES = ("latest", "best", "final")


def choose(inventory: Inventory, word: str) -> Entry:
    """Resolve to a checkpoint.

    Raises:
        UserError: there is no such checkpoint; the message suggests similar ones.
    """
    run = inventory.rundir.path
    if not inventory.entries:
        raise UserError(f"{run} has no checkpoints")
    if word in ALIASES:
        return _special(inventory, word)
    # A number is a step; a trailing slash comes from completion of a path.
    name = checkpoint_name(int(word)) if word.isascii() and word.isdecimal() else word.rstrip("/")
    for entry in inventory.entries:
        if entry.name == name:
            return entry
    raise UserError(f"{run} has no checkpoint {_described(word)}{_nearest(inventory, name)}")


def sound(inventory: Inventory, word: str) -> tuple[Entry, Manifest]:
    """Resolve to a checkpoint that can be read, and its manifest.

    Raises:
        UserError: there is no such checkpoint, or it is damaged or set aside.
    """
    entry = choose(inventory, word)
    # It exists, but its weights cannot be trusted.
    if entry.manifest is None:
        how = "was set aside" if entry.state in ("bad", "stale") else "cannot be used"
        raise UserError(f"{entry.name} {how}{f': {entry.why}' if entry.why else ''}. {existing(inventory)}")
    return entry, entry.manifest


def counting(inventory: Inventory) -> list[tuple[Entry, Manifest]]:
    """List all checkpoints that count, oldest first, with their manifests.

    Raises:
        UserError: there are none.
    """
    pairs = [(entry, entry.manifest) for entry in inventory.counting if entry.manifest is not None]
    if not pairs:
        raise UserError(f"{inventory.rundir.path} has no checkpoint that counts. {existing(inventory)}")
    return sorted(pairs, key=lambda pair: pair[0].step)


def existing(inventory: Inventory, limit: int = 5) -> str:
    """Sentence that lists the checkpoints there are."""
    names = [entry.name for entry in inventory.entries if entry.manifest]
    return f"There are: {join_names(names, limit)}" if names else "No other can be read"


def _special(inventory: Inventory, word: str) -> Entry:
    run = inventory.rundir.path
    flag = {"latest": "is_latest", "best": "is_best", "final": "is_final"}[word]
    for entry in inventory.entries:
        if getattr(entry, flag):
            return entry
    if word == "latest":
        raise UserError(f"{run} has no checkpoint that counts. {existing(inventory)}")
    if word == "final" and inventory.final is None:
        raise UserError(f"{run} has no final checkpoint: training is not complete. `latest` is the newest one")
    # The run's records name a checkpoint that retention or a user has deleted since.
    missing = inventory.final if word == "final" else inventory.lost_best
    if missing:
        raise UserError(f"the {word} checkpoint of {run}, {missing}, no longer exists. {existing(inventory)}")
    raise UserError(f"{run} has no best checkpoint: no existing checkpoint has been evaluated. {existing(inventory)}")


def _nearest(inventory: Inventory, name: str) -> str:
    """End of a sentence that names similar checkpoints."""
    names = [entry.name for entry in inventory.entries]
    digits = name.removeprefix("step-").partition(".")[0]
    if digits.isascii() and digits.isdecimal():
        # A number or a name with a number: suggest the steps around it. Anything else may be a typing error.
        nearest = sorted(inventory.entries, key=lambda entry: abs(entry.step - int(digits)))[:2]
        if nearest[0].step == int(digits):
            return f". Did you mean {nearest[0].name}?"
        return f". The nearest: {', '.join(sorted(entry.name for entry in nearest))}"
    close = get_close_matches(name.lower(), [*ALIASES, *names], n=1, cutoff=0.6)
    if close:
        return f". Did you mean {close[0]}?"
    return f"; give a name, a step, or one of {', '.join(ALIASES)}. {existing(inventory)}"


def _described(word: str) -> str:
    return f"of step {int(word):,}" if word.isascii() and word.isdecimal() else word[:80]
