"""Users made for the papers' tasks: samples with targets, and nets that are trained whole."""
