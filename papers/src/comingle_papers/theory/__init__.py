"""The convergence theory of CoMiGS (section 3.4 and appendix F) as numbers: schemes, constants, and what is measured.

Everything is numpy and scipy in float64, on problems of a few dozen variables. ``quadratics`` has Example 1,
Theorem F.1 and coupled variables; ``linear`` has linear experts, Proposition 1 and Theorem F.2; ``checks`` runs the
schemes beside their bounds and draws them. Where a statement of the paper is wrong or incomplete, the function that
computes it says so and gives the form that holds; papers/docs/papers.md lists them.
"""
