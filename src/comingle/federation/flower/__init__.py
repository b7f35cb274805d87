"""Over the network, with Flower's Fleet API: it moves bytes, and does not know what they mean.

    comingle server                                comingle client
      fleet_server                                   fleet_client
        Gate ── Fleet API ◄──── HTTP(S), polled ────── MessageLoop ── ClientApp
        ServerApp ── GridChannel                         └─ socket ─ worker      torch, the base model

Each line is a process but for those that begin inside one. Nothing outside this package imports ``flwr``.
"""
