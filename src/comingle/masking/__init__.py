"""Secure aggregation: a server that learns the sum of its users' uploads and nothing of any of them.

Bonawitz et al. 2017 ("Practical Secure Aggregation for Privacy-Preserving Machine Learning"), against a server that is
curious and follows the protocol. One sum takes four steps, in each of which users may be lost:

1. *advertise*: each user makes two keys for this sum alone, and sends their public halves;
2. *share*: it learns the others' keys, and sends each a share of its masking key and of its own mask's seed, sealed;
3. *mask*: it adds to its upload its own mask, and one with every other user who has shared, which cancel in the sum;
4. *unmask*: it learns who is in the sum, and gives its shares: of the own masks of those who are, of the masking keys
   of those who are not. ``threshold`` users have to; fewer reveal nothing.

Arithmetic is on whole numbers modulo ``2^word``, on which masks are uniform. Nothing here knows tensors' names, files
or a network; messages are those of :mod:`comingle.protocol`.
"""
