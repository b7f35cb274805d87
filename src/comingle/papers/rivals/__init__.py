"""Methods from before and after the three papers, and our own answer; they reach the core as any plug-in does."""
