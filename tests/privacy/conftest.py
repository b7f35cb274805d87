"""Tests of private runs use the command line within their process, too."""

from tests.commands import comingle as comingle
