"""Tests of robust aggregation use the command line within their process, too."""

from tests.commands import comingle as comingle
