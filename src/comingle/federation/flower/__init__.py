"""Transport over Flower's Fleet API. It moves bytes and does not interpret them.

    comingle server                                comingle client
      fleet_server                                   FleetClient
        Gate ── Fleet API ◄──── HTTP(S), polled ────── MessageLoop ── ClientApp
        ServerApp ── GridChannel                         └─ CallQueue ── main thread: torch, the base model

Server and client are a process each; a client's message loop runs in a thread of its own. Only this package imports
``flwr``.
"""
