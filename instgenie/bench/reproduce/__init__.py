"""The tables and figures of the InstGenIE paper, measured here: one file for each, and one report of all."""
