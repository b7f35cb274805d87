"""The command line, beside the package of that name."""

from commands import comingle as comingle_command  # noqa: F401  (a fixture)
