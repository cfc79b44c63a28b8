"""`python -m instgenie` is the command line."""

from instgenie.cli import run

run()
