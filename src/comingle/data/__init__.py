"""Data of users: reading, splitting and encoding.

``sources``, ``tables``, ``row_files`` and ``files`` read documents and rows. ``splits`` cuts them into train, valid and
test. ``text``, ``conversations`` and ``samples`` produce the training data of each kind.
"""
