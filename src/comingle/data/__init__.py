"""Users' data: read it, split it, tokenise it, pack it into streams, draw windows and batches from it.

From text to batches, one module a step:

    sources     files, folders and Hugging Face data sets -> documents (the only module that imports ``datasets``)
    files       plain text files and folders of them -> documents
    partition   documents -> train, valid and test of a user; mixtures of users; overlap between the splits
    tokenise    documents -> one stream of tokens
    pack        a user's three splits -> three streams, checked against the context length
    batches     a stream -> random windows (training), consecutive windows (evaluation)
    seeds       every random stream, from what it is for

Samples, inputs with targets, go another way:

    arrays      npz files and arrays -> samples
    splits      hold out part of a user's samples, label by label
    samples     a user's samples; everybody's in one tensor, shuffled batches of them, checks

Questions with answers (FedMerge's XNLI and XQuAD) are text again, but whole samples instead of streams:

    questions   XNLI and XQuAD -> the same questions for each user, in a language of its own
    answers     questions -> windows of tokens in which the prompt is read and the answer predicted
"""
