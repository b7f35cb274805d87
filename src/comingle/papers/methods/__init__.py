"""Methods that the three papers propose or compare themselves with."""
