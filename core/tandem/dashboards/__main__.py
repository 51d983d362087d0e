"""Writes dashboards and alerts below the current folder, the repository's root; with --check only compares them."""

import sys

from tandem.dashboards import FILES
from tandem.schema.writing import main

if __name__ == "__main__":
    sys.exit(main("python -m tandem.dashboards", FILES))
