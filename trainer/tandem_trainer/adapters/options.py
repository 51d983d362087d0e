"""Refuses and warns of the options of a script that an adapter does not support, when training starts.

tandem.job.adapter_options lists them. This module imports none of the libraries.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.job.adapter_options import Table, is_same
from tandem_trainer.failure import ConfigurationError

log = logging.getLogger(__name__)

UNKNOWN = object()
"""Placeholder for an unknown default."""


def check(table: Table, values: Mapping[str, Any], defaults: Mapping[str, Any], adapter: str) -> None:
    """Refuse options that a script has set and an adapter cannot support, and warn of the others.

    Args:
        values: options and their values.
        defaults: values of a script that sets nothing; an option without a default counts as set.
        adapter: the call of the adapter, for messages.

    Raises:
        ConfigurationError: names the first refused option, the reason, and what to use instead.
    """
    changed = {name: value for name, value in values.items() if not _same(value, defaults.get(name, UNKNOWN))}
    for name, value in changed.items():
        option = table.options.get(name)
        if option is not None and option.treatment == "refused" and option.concerns(value):
            raise ConfigurationError(f"{adapter}: {_assignment(name, value)} of {table.call}: {option.note}")
    for name, value in changed.items():
        option = table.options.get(name)
        if option is None:
            _warn(
                f"{adapter}: {_assignment(name, value)} of {table.call} is not known to this version of Tandem; "
                "whether a run that is resumed ends as an undisturbed one is not tested"
            )
        elif option.treatment == "warned" and option.concerns(value):
            _warn(f"{adapter}: {_assignment(name, value)} of {table.call}: {option.note}")


def refuse(table: Table, names: Iterable[str], adapter: str) -> None:
    """Refuse names that a table lists as refused.

    Raises:
        ConfigurationError: one of the names is refused.
    """
    for name in names:
        option = table.options.get(name)
        if option is not None and option.treatment == "refused":
            raise ConfigurationError(f"{adapter}: {name} of {table.call}: {option.note}")


def _warn(sentence: str) -> None:
    # Every rank has the same options; only one warns.
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", sentence)


def _assignment(name: str, value: Any) -> str:
    value = getattr(value, "value", value)
    return f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is the default, also where the library has replaced an empty value by another one."""
    if default is UNKNOWN:
        return False
    value, default = getattr(value, "value", value), getattr(default, "value", default)
    if not isinstance(value, bool | int | float | str | type(None) | list | tuple | dict):
        return False
    return is_same(value, default)
