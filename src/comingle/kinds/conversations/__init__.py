"""Users with conversations: the loss is on the responses, which models may also give by themselves."""
