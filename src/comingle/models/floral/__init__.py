"""FLoRAL: adaptors per cluster at every layer of a model, mixed by one softmax router per user.

Source: "Collaborative and Efficient Personalization with Mixtures of Adaptors", sections 3.2 and 5, appendices D to F.
"""
