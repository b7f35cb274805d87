"""Methods that came before and after the three papers, each in one file, which reach the core as any plug-in does."""
