"""Over the network, with Flower's deployment engine: it moves bytes, and what they mean is not known here.

    coordinator                                          each user
    flower-superlink                                     flower-supernode
      flower-superexec                                     flower-superexec
        flwr-serverapp   GridChannel ── messages ──────────  flwr-clientapp   one short process for each message
                                                               └─ socket ─ worker   one long process: torch, the base

Nothing outside this package imports ``flwr``.
"""
