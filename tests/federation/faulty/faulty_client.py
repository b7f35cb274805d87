"""``comingle`` with a client whose answers may be changed before they are sent."""

from tests.federation.faulty.faults import FaultyClient

from comingle.cli import main
from comingle.federation import client

if __name__ == "__main__":
    client.Client = FaultyClient  # type: ignore[misc]
    main()
