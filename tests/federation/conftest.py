"""The tests of federations run the command line within their process, too."""

from tests.commands import comingle as comingle
