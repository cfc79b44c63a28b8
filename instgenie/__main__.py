"""`python -m instgenie` is the command line."""

import sys

from instgenie.cli import main

sys.exit(main())
