"""The tables and figures of the InstGenIE paper, measured again: one file per part, and one report of all."""
