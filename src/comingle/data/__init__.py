"""Users' data: read it, split it, tokenise it, pack it into streams, draw windows and batches from it.

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

Tasks that are not language (FLoRAL's regressions and images, FedMerge's images) go another way:

    synthetic   regressions with a known truth -> samples of each user
    images      IDX (``idx``), npz and hub -> labelled images, with their domains where they have some
    transforms  turn, flip, crop and normalise images
    shifted     FLoRAL: images -> users, turned or relabelled by cluster
    skewed      FedMerge: images -> users who differ by labels, cluster or domain
    groups      clusters of labels, Dirichlet shares, even shares: which image goes to whom
    splits      hold out part of a user's samples, label by label
    settings    the numbers of every task
    tasks       a task by name -> users with their samples, and which net they train
    samples     a user's samples; everybody's in one tensor, shuffled batches of them, checks

Questions with answers (FedMerge's XNLI and XQuAD) are text again, but whole samples instead of streams:

    questions   XNLI and XQuAD -> the same questions for each user, in a language of its own
    answers     questions -> windows of tokens in which the prompt is read and the answer predicted
"""
