"""Export of a user's model to other programs' formats."""
