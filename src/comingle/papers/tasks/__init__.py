"""Users made for tasks that are not language: samples with targets, and nets that are trained whole."""
