"""Transport over Flower's Fleet API. It moves bytes and does not interpret them.

    comingle server                                comingle client
      fleet_server                                   fleet_client
        Gate ── Fleet API ◄──── HTTP(S), polled ────── MessageLoop ── ClientApp
        ServerApp ── GridChannel                         └─ socket ─ worker      torch, the base model

``fleet_server``, ``fleet_client`` and ``worker`` are processes; the indented parts run inside them. Only this package
imports ``flwr``.
"""
