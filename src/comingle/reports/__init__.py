"""Tables and pictures of runs; reads run folders, never imports torch."""
