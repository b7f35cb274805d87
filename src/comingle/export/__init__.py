"""A user's model in the formats of other programs: transformers, PEFT, llama.cpp."""
