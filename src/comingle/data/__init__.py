"""Users' text: read it, split it, tokenise it, pack it into streams, draw windows from them.

From text to batches, one module a step:

    sources     files, folders and Hugging Face data sets -> documents (the only module that imports ``datasets``)
    files       plain text files and folders of them -> documents
    demo        four users that every machine has -> documents
    partition   documents -> train, valid and test of a user; mixtures of users; overlap between the splits
    tokenise    documents -> one stream of tokens
    pack        a user's three splits -> three streams, checked against the context length
    batches     a stream -> random windows (training), consecutive windows (evaluation)
    preview     what a user holds, for people
    seeds       every random stream, from what it is for
"""
