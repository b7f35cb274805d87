"""Tables and figures of runs. Reads run folders and never imports torch."""
