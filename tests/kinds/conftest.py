"""Kinds of data are also run on the command line, within the process of the tests."""

from commands import comingle as comingle
