"""Users who are asked questions: the loss is on the answers, which models also give by themselves."""
