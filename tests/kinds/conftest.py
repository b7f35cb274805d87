"""The tests of the command line run it within their process."""

from commands import comingle as comingle
