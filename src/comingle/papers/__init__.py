"""The first plug-in: what exists because a paper has it, beside a core that does not know of it.

``reproduce`` the published tables and figures · ``theory`` CoMiGS's convergence results · ``recipes`` what they run ·
``verbs`` the two commands, which reach ``comingle`` through the entry points in ``pyproject.toml``.
"""
