from tandem.errors import UserError as UserError
from tandem.script import log as log
from tandem.script import pausing as pausing
from tandem_cli.client import AsyncClient as AsyncClient
from tandem_cli.client import Client as Client
from tandem_cli.client import Job as Job
from tandem_cli.client import frame as frame

__all__ = ["__version__", "log", "pausing"]

__version__: str
