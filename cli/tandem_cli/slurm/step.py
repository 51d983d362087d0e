"""`tandem_launcher.slurm.step` by the name that running heads of the version before know."""

import sys

from tandem_launcher.slurm.step import main

if __name__ == "__main__":
    sys.exit(main())
