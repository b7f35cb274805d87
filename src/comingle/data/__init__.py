"""Users' data: read, split and tokenised.

``sources``, ``tables``, ``row_files`` and ``files`` read documents and rows; ``splits`` parts them into train, valid
and test; ``text``, ``conversations`` and ``samples`` make what each kind trains on.
"""
