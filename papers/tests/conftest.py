"""The papers' verbs are run within the tests' process."""

from commands import comingle as comingle
