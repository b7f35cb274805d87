"""FLoRAL: mixtures of the clusters' adaptors at every layer of any model, mixed by one softmax per user.

Source: "Collaborative and Efficient Personalization with Mixtures of Adaptors", sections 3.2 and 5, appendices D to F.
"""
