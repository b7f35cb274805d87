"""Everything that methods have in common: the round loop, optimisers, cohorts, evaluation, checkpoints, events."""
