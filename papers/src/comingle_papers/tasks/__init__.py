"""Users made for the papers' tasks: samples with targets, and nets that are trained whole.

making      a task by name -> users with their samples, and which net they train
settings    the numbers of every task
synthetic   regressions with a known truth -> samples of each user
images      IDX (``idx``), npz and hub -> labelled images, with their domains where they have some
transforms  turn, flip, crop and normalise images
shifted     FLoRAL: images -> users, turned or relabelled by cluster
skewed      FedMerge: images -> users who differ by labels, cluster or domain
groups      clusters of labels, Dirichlet shares, even shares: which image goes to whom
"""
