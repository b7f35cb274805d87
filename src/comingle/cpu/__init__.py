"""What is made for processors alone, beside mixtures (:mod:`comingle.adapters.native`): losses and causal attention."""
