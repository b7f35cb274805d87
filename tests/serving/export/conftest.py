"""Exports are of the bases that the tests of models have, and read no cache of the user's either."""

from tests.models.conftest import own_caches as own_caches
from tests.models.conftest import saved as saved
from tests.models.conftest import stories as stories
